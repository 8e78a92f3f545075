"""Dense retrieval over a passage corpus, served to agents over loopback HTTP in Search-R1's wire format."""
