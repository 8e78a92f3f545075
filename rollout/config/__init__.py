"""Config sections of the rollout side, and the live objects that are made of them."""
