"""The child of ``server_and_indexer.py``: 190 MiB of postings, a word at a time."""

postings: dict[int, list[float]] = {}
for word in range(1_000):
    postings[word] = [float(word + place) for place in range(6_000)]  # TAKEN
print(len(postings))
