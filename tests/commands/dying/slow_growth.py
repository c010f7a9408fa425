"""Grow by about 50 MiB a second, which no single step shows."""

import hashlib


def digest(number: int) -> bytes:
    return hashlib.pbkdf2_hmac("sha256", b"", number.to_bytes(4), 1, 2**16)  # TAKEN


digests = [digest(number) for number in range(8_000)]  # CALLED
print(len(digests))
