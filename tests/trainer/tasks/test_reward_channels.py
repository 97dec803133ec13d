"""A Python object as a reward function: what it may not hold up."""

import subprocess
import sys


def test_the_interpreter_ends_though_a_python_object_hangs() -> None:
    program = (
        "import time\n"
        "from sparkgrpo.trainer.tasks.reward_call import RewardFunction\n"
        "from sparkgrpo.trainer.tasks.reward_channels import ThreadChannel\n"
        "def hangs(completions): time.sleep(3600)\n"
        "channel = ThreadChannel([RewardFunction.of(hangs)], 1.0, print)\n"
        "job = {'only': ['hangs'], 'texts': ['a'], 'is_plain': True,\n"
        "       'problems': [{'prompt': 'p', 'columns': {}}], 'problem_of_row': [0]}\n"
        "channel.submit(job, 1.0)\n"
        "time.sleep(0.2)\n"
        "channel.close()\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
