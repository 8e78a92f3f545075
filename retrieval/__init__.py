"""Dense retrieval over a passage corpus, served to agents over loopback HTTP in Search-R1's wire format.

corpus    JSON-lines passages: row number == vector id
encoder   text -> unit vectors, with an identity that an index remembers
index     inner-product search over a verified folder
scan      exact search in half precision, by torch or on GPUs
facets    which passages have which values, for filters
lexical   BM25, and its fusion with vectors
build     an index of one's own passages, in shards; the manifest of a published one
batcher   many concurrent requests -> few searches, on one thread
app       the HTTP routes, limits and statuses
server    `python -m mcore_mas.retrieval.server`
client    what agents import, without torch or FAISS; the servers that it asks, with circuit breakers
sidecar   the server as a child process
wire      limits and JSON shapes that server and client share
"""

if __name__ == "retrieval":  # from the checkout's folder; a second copy of each module would meet the first
    raise ModuleNotFoundError("No module named 'retrieval'", name="retrieval")
