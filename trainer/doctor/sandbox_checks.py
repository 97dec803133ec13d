"""The walls around programs that a model wrote: what `trainer/tasks/sandbox/self_test.py` tries, one row a wall."""

from sparkgrpo.trainer.doctor.finding import Finding, Machine
from sparkgrpo.trainer.tasks.sandbox.self_test import CURES, HONEST, SandboxReport, self_test

UNNEEDED = "tasks without programs need none of it"


def check_landlock(machine: Machine) -> Finding:
    """Files and folders that a confined child must not reach."""
    report = self_test("strict")
    about = "" if report.abi is None else f"ABI {report.abi}, "
    return _of_layers("landlock", ("landlock",), report, about)


def check_seccomp(machine: Machine) -> Finding:
    """System calls that a confined child must not make, its limits, and work that it must be able to do."""
    report = self_test("strict")
    return _of_layers(
        "seccomp", ("seccomp", "rlimits", "no_capabilities", "no_new_privs", "zygote", HONEST), report, ""
    )


def _of_layers(name: str, layers: tuple[str, ...], report: SandboxReport, about: str) -> Finding:
    mine = [finding for finding in report.findings if finding.layer in layers]
    failed = [finding for finding in report.failures if finding.layer in layers]
    if failed:
        cure = CURES.get(failed[0].layer, "report it with the kernel's version")
        found = f"layer {failed[0].layer} does not hold on Linux {report.kernel}: {failed[0].name}: {failed[0].detail}"
        return Finding(name=name, verdict="problem", found=found, cure=f"{cure}; {UNNEEDED}")
    if not mine:  # another wall could not be put up, so that none was tried
        other = report.failures[0]
        return Finding(name=name, verdict="cannot say", found=f"not tried, since {other.layer} failed: {other.detail}")
    tried = ", ".join(finding.name for finding in mine)
    return Finding(name=name, verdict="ok", found=f"{about}{len(mine)} probes in a confined child went right: {tried}")
