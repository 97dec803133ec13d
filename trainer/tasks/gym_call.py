"""What a confined fork runs for a data set of reasoning-gym; its zygote imported that package before the walls."""


def score_answer(dataset: str, seed: int, entry: dict | None, answer: str) -> float:
    """The data set's score of an answer, 0 to 1; the entry is made again from its seed where it is not given."""
    import reasoning_gym

    made = reasoning_gym.create_dataset(dataset, size=1, seed=seed)
    return float(made.score_answer(answer, made[0] if entry is None else entry))
