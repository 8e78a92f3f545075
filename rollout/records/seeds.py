"""Seeds of all random choices in a run."""

import hashlib


def derive_seed(*path: int | str) -> int:
    """Return the 64-bit seed of a random choice.

    A seed is a hash of the position of the choice in the run. There is no generator state to save
    or restore: after any restart, the same position gives the same seed.

    Args:
        path: position of the choice, for example (run seed, step, task, sample, agent, turn).
    """
    text = "\x1f".join([f"{type(part).__name__}:{part}" for part in path])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
