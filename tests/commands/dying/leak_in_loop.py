"""Answer requests, and keep every answer in a log."""


class Server:
    def __init__(self) -> None:
        self.log: list[str] = []

    def answer(self, request: int) -> int:
        text = " ".join(str(request * number) for number in range(200_000))  # TAKEN
        self.log.append(text)
        return len(text)


server = Server()
sent = 0
for request in range(10**9, 10**9 + 200):
    sent += server.answer(request)  # CALLED
print(sent)
