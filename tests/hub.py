"""A small Hugging Face Hub for tests: as much of its protocol as datasets, huggingface_hub and
transformers ask for when they read.

    with Hub() as hub:
        hub.add("datasets", "openai/gsm8k", {"README.md": b"...", "main/train.parquet": b"..."})
        # point HF_ENDPOINT at hub.url

It has what the real one has where a client could stumble: large files are redirected to another
host, a branch is not a commit, ranges are answered, errors carry their X-Error-Code.
"""

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = (".parquet", ".safetensors", ".jsonl")  # what the real one keeps apart and redirects to
TOKEN = "hf_of_one_who_accepted"  # opens what is gated
ERRORS = {
    "missing": (401, "RepoNotFound", "Repository not found"),
    "gated": (401, "GatedRepo", "Access to this repository is restricted. You must have access to "
                                "it and be authenticated to access it. Please log in."),
    "refused": (403, "GatedRepo", "Access to this repository is restricted and you are not in the "
                                  "authorized list. Visit its page to ask for access."),
    "token": (401, None, "Invalid credentials in Authorization header"),
    "revision": (404, "RevisionNotFound", "Invalid rev id"),
    "entry": (404, "EntryNotFound", "Entry not found"),
    "down": (503, None, "Service unavailable"),
}


@dataclass
class Repository:
    """files: {path: bytes}. fault: None, a name of ERRORS, or

    token opens       gated, but not for TOKEN
    breaks            the connection ends half way through a large file, every time
    breaks once       the same, but what is left can be had with a range
    slow, slow files  no answer at all, or none for large files
    """

    files: dict
    fault: str | None = None
    commit: str = field(init=False)

    def __post_init__(self):
        parts = [path.encode() + content for path, content in sorted(self.files.items())]
        self.commit = hashlib.sha1(b"".join(parts)).hexdigest()

    def entry(self, path):
        """A file or a folder as the listing of a repository shows it; None where there is none."""
        if path in self.files:
            content = self.files[path]
            large = dict(oid=hashlib.sha256(content).hexdigest(), size=len(content),
                         pointerSize=134)
            return dict(type="file", path=path, size=len(content), oid=blob(content),
                        **(dict(lfs=large) if path.endswith(LARGE) else {}))
        if any(name.startswith(path + "/") for name in self.files):
            return dict(type="directory", path=path, size=0, oid=blob(path.encode()))
        return None

    def listing(self, folder, recursive):
        below = [name for name in self.files if not folder or name.startswith(folder + "/")]
        paths = {}
        for name in below:
            parts = name.split("/")
            for depth in range(1, len(parts) + 1):
                paths["/".join(parts[:depth])] = depth
        depth = folder.count("/") + 2 if folder else 1
        return [self.entry(path) for path, at in sorted(paths.items())
                if at >= depth and (recursive or at == depth)]


def blob(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.answer()

    def do_HEAD(self):
        self.answer()

    def do_POST(self):
        self.answer()

    def send(self, status, body=b"", **headers):
        """An answer; `headers` have _ for -, and None leaves one out."""
        self.send_response(status)
        headers = {"Content_Length": str(len(body)), **headers}
        for name, value in headers.items():
            if value is not None:
                self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_json(self, value, **headers):
        self.send(200, json.dumps(value).encode(), Content_Type="application/json", **headers)

    def send_error_of(self, name, **headers):
        status, code, message = ERRORS[name]
        self.send(status, json.dumps(dict(error=message)).encode(), X_Error_Code=code,
                  X_Error_Message=message, Content_Type="application/json", **headers)

    def answer(self):
        hub, url = self.server.hub, urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        query = parse_qs(url.query) | parse_qs(body)
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        hub.requests.append((self.command, unquote(url.path)))
        if parts[0] == "cdn":
            return self.send_file(*hub.contents[parts[1]])
        # [api/] [datasets/ or models/] OWNER/NAME [/ACTION [/REVISION [/PATH]]]
        kind = next((part for part in parts[:2] if part in ("datasets", "models")), "models")
        rest = [part for part in parts if part not in ("api", kind)]
        repository = hub.repositories.get((kind, "/".join(rest[:2])))
        if repository is None:
            return self.send_error_of("missing")
        if repository.fault == "slow":
            return hub.closing.wait()
        card = "README.md" in rest or rest[2:3] in ([], ["revision"])  # anyone may read these
        fault = repository.fault
        if fault == "token opens" and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            fault = "gated"
        if fault in ("down", "token") or fault in ERRORS and not card:
            return self.send_error_of(fault)
        action, revision = (rest[2:4] + ["revision", "main"][len(rest[2:4]):])
        if revision not in ("main", repository.commit):
            return self.send_error_of("revision")
        return self.act(repository, "/".join(rest[:2]), action, "/".join(rest[4:]), query)

    def act(self, repository, name, action, path, query):
        if action == "revision":
            files = [dict(rfilename=path) for path in repository.files]
            return self.send_json(dict(
                _id="1", id=name, sha=repository.commit, siblings=files, private=False, gated=False,
                disabled=False, downloads=0, likes=0, tags=[],
                lastModified="2026-01-01T00:00:00.000Z", createdAt="2026-01-01T00:00:00.000Z"))
        if action == "tree":
            if path and (repository.entry(path) or {}).get("type") != "directory":
                return self.send_error_of("entry", X_Repo_Commit=repository.commit)
            recursive = query.get("recursive", [""])[0].lower() in ("true", "1")
            return self.send_json(repository.listing(path, recursive))
        if action == "paths-info":
            entries = [repository.entry(path.strip("/")) for path in query.get("paths", [])]
            return self.send_json([entry for entry in entries if entry])
        if action == "resolve":
            return self.resolve(repository, path)
        return self.send_error_of("entry")

    def resolve(self, repository, path):
        if path not in repository.files:
            return self.send_error_of("entry", X_Repo_Commit=repository.commit)
        content = repository.files[path]
        if not path.endswith(LARGE):
            return self.send_file(content, None, X_Repo_Commit=repository.commit)
        key = hashlib.sha256(content).hexdigest()
        self.server.hub.contents[key] = content, repository.fault
        # localhost is another host than 127.0.0.1, as the real one's storage is
        there = f"http://localhost:{self.server.server_address[1]}/cdn/{key}"
        return self.send(302, Location=there, X_Repo_Commit=repository.commit,
                         X_Linked_Etag=f'"{key}"', X_Linked_Size=str(len(content)))

    def send_file(self, content, fault=None, **headers):
        etag = f'"{hashlib.sha256(content).hexdigest()}"' if not headers else f'"{blob(content)}"'
        headers = dict(headers, ETag=etag, Accept_Ranges="bytes")
        if fault == "slow files":
            return self.server.hub.closing.wait()
        first, last, status = 0, len(content) - 1, 200
        if asked := self.headers.get("Range"):
            start, end = asked.removeprefix("bytes=").split("-")
            first = int(start) if start else len(content) - int(end)
            last = min(last, int(end)) if start and end else last
            status = 206
            headers["Content_Range"] = f"bytes {first}-{last}/{len(content)}"
        part = content[first:last + 1]
        breaks = fault == "breaks" or fault == "breaks once" and first == 0
        if breaks and self.command == "GET":
            self.send(status, b"", **headers, Content_Length=str(len(part)))
            part, self.close_connection = content[first:len(content) // 2], True
            self.server.hub.sent += len(part)
            self.wfile.write(part)
            return
        if self.command == "GET":
            self.server.hub.sent += len(part)
        self.send(status, part, **headers)


class Hub:
    """A server on 127.0.0.1, in threads. requests: [(method, path)] of everything asked so far.
    sent: bytes of files that were sent."""

    def __init__(self):
        self.repositories, self.contents, self.requests, self.sent = {}, {}, [], 0
        self.closing = threading.Event()  # ends the answers that never come
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads, self.server.hub = True, self
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def add(self, kind, name, files, fault=None):
        """kind: "datasets" or "models". files: {path: bytes}."""
        self.repositories[kind, name] = Repository(files, fault)

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()
