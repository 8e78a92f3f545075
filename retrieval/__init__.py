"""Retrieval of passages from a corpus, served over HTTP in Search-R1's wire format."""
