"""``python -m sparkgrpo.trainer`` is ``sparkgrpo``."""

from sparkgrpo.trainer.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
