"""A server in this process with answers defined by the test, which can go down and come back at the same address."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class LocalServer:
    """Answers each POST with the result of `answer(body, handler)`: JSON data, or (status, text, headers)."""

    def __init__(self, answer):
        self.answer, self.requests, self.port = answer, [], 0
        self.up()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def up(self):
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                owner.requests.append((self.path, body, dict(self.headers)))
                answer = owner.answer(body, self)
                status, text, headers = answer if isinstance(answer, tuple) else (200, json.dumps(answer), {})
                self.send_response(status)
                for name, value in {"Content-Length": str(len(text.encode())), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *arguments):
                pass

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request, client_address):  # tests may hang up
                pass

        self._server = Quiet(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def down(self):
        self._server.shutdown()
        self._server.server_close()
