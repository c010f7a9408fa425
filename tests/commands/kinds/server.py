"""Serve "ready" on a port until SIGTERM, and end with exit code 0 then."""

import signal
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"ready\n")

    def log_message(self, *_: object) -> None:
        pass


server = HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
signal.signal(signal.SIGTERM, lambda *_: Thread(target=server.shutdown).start())
server.serve_forever()
print("closed")
