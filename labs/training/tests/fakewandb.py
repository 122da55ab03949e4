"""A W&B server on this machine: as much of its protocol as a run needs, with faults to switch on.

It keeps what it was sent: the rows of each run's history, its config, and every byte that came, so that tests can look
for what must not be there.
"""

from __future__ import annotations

import gzip
import json
import re
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "f" * 32 + "0123456789abcdef"


class FakeWandb:
    """Entered while it runs. `fault`: "", "401", "403", "500", "hang at init", "hang at finish", or "403 for rows"."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.rows: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
        self.exit_codes: dict[str, int] = {}
        self.configs: dict[str, dict[str, Any]] = {}
        self.received = b""
        self.released = threading.Event()
        """Set when the test is over: what hangs goes on then."""
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None: ...

            def do_GET(self) -> None:
                self.answer({})

            def do_PUT(self) -> None:
                self.body()
                self.answer({})

            def do_POST(self) -> None:
                body = self.body()
                if self.path.endswith("/graphql"):
                    self.graphql(json.loads(body))
                elif self.path.endswith("/file_stream"):
                    self.file_stream(json.loads(body))
                else:
                    self.answer({})

            def body(self) -> bytes:
                raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                server.received += raw
                if self.headers.get("Content-Encoding") == "gzip":
                    raw = gzip.decompress(raw)
                server.received += raw
                return raw

            def graphql(self, request: dict[str, Any]) -> None:
                if server.fault in ("401", "403", "500"):
                    self.answer({"errors": [{"message": "refused by the test"}]}, int(server.fault))
                    return
                if server.fault == "hang at init":
                    server.released.wait()
                self.answer({"data": server.answer_query(request["query"], request.get("variables") or {})})

            def file_stream(self, request: dict[str, Any]) -> None:
                run = self.path.split("/")[-2]
                if server.fault == "403 for rows":
                    self.answer({"error": "refused by the test"}, 403)
                    return
                if server.fault == "hang at finish":
                    server.released.wait()
                server.take(run, request)
                self.answer({"exitcode": None, "limits": {}})

            def answer(self, value: Any, status: int = 200) -> None:
                content = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> FakeWandb:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()

    def answer_query(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        """What W&B would say, as far as its client asks."""
        (name,) = re.findall(r"(?:query|mutation)\s+(\w+)", query)[:1] or [""]
        run = str(variables.get("name") or variables.get("runName") or variables.get("run") or "")
        project = {"id": "p", "name": "llm-training-lab", "entity": {"id": "e", "name": "someone"}}
        if name == "Viewer":
            return {
                "viewer": {"id": "v", "entity": "someone", "username": "someone", "flags": "{}", "teams": {"edges": []}}
            }
        if name == "RunResumeStatus":
            return {"model": {**project, "bucket": self.resume_state(run)}}
        if name == "UpsertBucket":
            if variables.get("config"):
                self.configs[run] = json.loads(variables["config"])
            bucket = {"id": "b", "name": run, "displayName": run, "description": "", "config": "{}", "project": project,
                      "sweepName": "", "historyLineCount": len(self.rows[run])}  # fmt: skip
            return {"upsertBucket": {"bucket": bucket, "inserted": not self.rows[run]}}
        if name == "CreateRunFiles":
            files = [{"name": file, "uploadUrl": f"{self.url}/upload"} for file in variables.get("files", [])]
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        return {}

    def resume_state(self, run: str) -> dict[str, Any] | None:
        """What is there of a run; None for one that is not known."""
        rows = self.rows.get(run)
        if not rows:
            return None
        last = rows[max(rows)]
        return {
            "id": "b", "name": run, "summaryMetrics": json.dumps(last), "displayName": run, "logLineCount": 0,
            "historyLineCount": len(rows), "eventsLineCount": 0, "historyTail": json.dumps([json.dumps(last)]),
            "eventsTail": "[]", "config": "{}", "tags": [], "wandbConfig": "{\"t\": {}}",
        }  # fmt: skip

    def take(self, run: str, request: dict[str, Any]) -> None:
        """Keeps what a file stream brings."""
        history = (request.get("files") or {}).get("wandb-history.jsonl")
        if history:
            for number, line in enumerate(history["content"], start=history["offset"]):
                self.rows[run][number] = json.loads(line)
        if request.get("complete"):
            self.exit_codes[run] = request.get("exitcode", 0)

    def updates(self, run: str, key: str = "train/loss") -> list[int]:
        """The updates of a run's rows that have a figure, in their order."""
        return [row["update"] for _, row in sorted(self.rows[run].items()) if key in row]
