"""Dense retrieval over a passage corpus, served to agents over loopback HTTP in Search-R1's wire format."""

if __name__ == "retrieval":  # from the checkout's folder; a second copy of each module would meet the first
    raise ModuleNotFoundError("No module named 'retrieval'", name="retrieval")
