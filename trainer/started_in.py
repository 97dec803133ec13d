"""Files that a run names relative to the folder it was started in, and a resume from another folder."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.task_config import reward_references


def check_folder(run_folder: str, config: Mapping[str, object], started_in: object) -> None:
    """Refuse to go on where a relative path of the run leads to another file, or to none, than at its start.

    The configuration keeps paths as they were given, so that runs of the same file compare wherever they were started.

    Args:
        run_folder: What `--resume` names.
        config: Settings as run.json has them.
        started_in: The folder of the first command; a run of an older sparkgrpo has none, and is not judged.

    Raises:
        UserError: Names the setting, and the folder that was meant.
    """
    if not isinstance(started_in, str):
        return
    before, now = Path(started_in).expanduser(), Path.cwd()
    for name, place in _places(config):
        # A name that was no file or folder at the start is one of the hub; one that is gone leaves nothing to mix up.
        if place.startswith("~") or Path(place).is_absolute() or not (before / place).exists():
            continue
        if not (now / place).exists() or not (now / place).samefile(before / place):
            raise UserError(
                f"{name}: {place} was given in the folder {before}, and here, in {now}, it is not that file; "
                f"go on from there: cd {before} and --resume {Path(run_folder).absolute()}"
            )


def _places(config: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Settings that may name a file or a folder, with it."""
    for name in ("data", "model"):
        if config.get(name):
            yield name, str(config[name])
    for reference in reward_references(str(config.get("reward") or "auto")):
        yield from _file("reward", reference.removeprefix("verl:"))
    for name in ("task", "checker"):
        yield from _file(name, str(config.get(name) or ""))


def _file(name: str, reference: str) -> Iterator[tuple[str, str]]:
    place = reference.rpartition(":")[0]
    if place.endswith(".py"):
        yield name, place
