"""Seeds of everything that a run draws at random."""

import hashlib


def derive_seed(*place: int | str) -> int:
    """Return a 64-bit seed for one place in a run, for example (run seed, step, task, sample, agent, turn).

    Every random choice is a hash of where it happens. There is no generator state to save or restore: the same place
    gives the same seed after any restart.
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in place)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
