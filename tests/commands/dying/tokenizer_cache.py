"""Keep the tokens of every word that was ever seen: a large dictionary of strings."""


class Tokenizer:
    def __init__(self) -> None:
        self.cache: dict[str, list[str]] = {}

    def tokens(self, word: str) -> list[str]:
        if word not in self.cache:
            self.cache[word] = [word[at : at + 3] for at in range(0, 24, 3)]  # TAKEN
        return self.cache[word]


tokenizer = Tokenizer()
count = 0
for number in range(1_000_000):
    count += len(tokenizer.tokens(f"{number:024d}"))  # CALLED
print(count)
