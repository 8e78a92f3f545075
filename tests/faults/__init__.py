"""Faults: kills, full disks, flipped bits and spoilt answers, and what then has to be the same."""
