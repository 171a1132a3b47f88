"""A loopback stand-in of the Hugging Face Hub, so that tests can run the real client code without a network.

Not covered: pull requests, deletions, parts of files, Xet storage, multipart LFS, YAML validation, tags, `.gitignore` rules, paging.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import tempfile
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit


FILE_ROUTE = re.compile(r"/(?:(dataset|space)s/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
API_ROUTE = re.compile(r"/api/(model|dataset|space)s/([^/]+/[^/]+)(?:/([a-z-]+)(?:/([^/]+)(?:/(.+))?)?)?")
LFS_ROUTE = re.compile(r"/(?:(dataset|space)s/)?([^/]+/[^/]+)\.git/info/lfs/objects/batch")
# All else goes inline with the commit. `Dataset.push_to_hub` cannot: it deletes each shard before it commits.
LFS_SUFFIXES = (".parquet",)


@dataclass
class Commit:
    sha: str
    title: str
    message: str
    date: str
    files: dict[str, bytes]


@dataclass
class Repo:
    kind: str
    id: str
    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    @property
    def url_path(self) -> str:
        return self.id if self.kind == "model" else f"{self.kind}s/{self.id}"

    def at(self, revision: str) -> Commit:
        """The commit that a branch name or a commit sha stands for."""
        sha = self.branches.get(revision, revision)
        if sha not in self.commits:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return self.commits[sha]


@dataclass
class Request:
    method: str
    path: str
    query: dict[str, str]
    headers: Message
    body: bytes


@dataclass
class Reply:
    body: bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


class HubError(Exception):
    """An error answer; `code` is what the client picks its exception class by."""

    def __init__(self, status: int, message: str, code: str = "", sha: str = "", **extra: str) -> None:
        super().__init__(message)
        headers = {"X-Error-Code": code, "X-Error-Message": message, "X-Repo-Commit": sha}
        body = json.dumps({"error": message, **extra}).encode()
        self.reply = Reply(body, status, {name: value for name, value in headers.items() if value})


def blob_oid(content: bytes) -> str:
    """Git's name of a blob: the client compares it with its own files and leaves out unchanged ones."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def entries(commit: Commit) -> dict[str, dict[str, Any]]:
    """Every file and folder of a commit by its path, described as the Hub does."""
    found: dict[str, dict[str, Any]] = {}
    for path, content in sorted(commit.files.items()):
        for folder in map(str, PurePosixPath(path).parents[:-1]):
            oid = hashlib.sha1(f"{commit.sha} {folder}".encode()).hexdigest()
            found[folder] = {"type": "directory", "path": folder, "oid": oid, "size": 0}
        found[path] = {"type": "file", "path": path, "oid": blob_oid(content), "size": len(content)}
    return found


class HubStandIn:
    """Serve a Hub on 127.0.0.1 for the duration of a `with` block; repositories live in memory."""

    def __init__(self, user: str = "user", token: str = "hf_stand_in_token") -> None:
        self.user = user
        self.token = token
        self.requests: list[tuple[str, str]] = []
        self.repos: dict[tuple[str, str], Repo] = {}
        self._lfs_objects: dict[str, bytes] = {}
        self._commit_count = 0
        self._lock = threading.Lock()

    def __enter__(self) -> HubStandIn:
        self._folder = tempfile.TemporaryDirectory(prefix="hub_stand_in_", ignore_cleanup_errors=True)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._folder.cleanup()

    def env(self) -> dict[str, str]:
        """Variables to lay over `os.environ` for a subprocess; every call names a new, empty HF_HOME."""
        home = Path(tempfile.mkdtemp(prefix="hf_home_", dir=self._folder.name))
        # An inherited value of any of these would win over HF_HOME, or keep the client from the stand-in.
        caches = ("HUB", "XET", "ASSETS", "DATASETS", "MODULES")
        off = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "HUGGINGFACE_CO_STAGING")
        no_proxy = ",".join(filter(None, [os.environ.get("NO_PROXY"), "127.0.0.1"]))
        on = ("XET", "TELEMETRY", "PROGRESS_BARS", "UPDATE_CHECK")
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_TOKEN": self.token,
            "HF_HOME": str(home),
            "HF_TOKEN_PATH": str(home / "token"),
            "HF_HUB_DISABLE_IMPLICIT_TOKEN": "0",
            "NO_PROXY": no_proxy,
            "no_proxy": no_proxy,
            **{f"HF_{name}_CACHE": str(home / name.lower()) for name in caches},
            **dict.fromkeys(off, "0"),
            **{f"HF_HUB_DISABLE_{name}": "1" for name in on},
        }

    def add(self, repo_id: str, files: dict[str, bytes]) -> None:
        """Make a public model repository with these files."""
        with self._lock:
            self.repos["model", repo_id] = Repo("model", repo_id, private=False)
            self._commit(self.repos["model", repo_id], "main", files, "initial commit")

    def files(self, repo_id: str, repo_type: str = "model", revision: str = "main") -> dict[str, bytes]:
        """Path -> content; like on the Hub, a new repository already holds a `.gitattributes`."""
        with self._lock:
            return dict(self.repos[repo_type, repo_id].at(revision).files)

    def answer(self, request: Request) -> Reply:
        with self._lock:
            self.requests.append((request.method, request.path))
            if match := FILE_ROUTE.fullmatch(request.path):
                repo = self._visible(request, match[1] or "model", match[2])
                return self._file(request, repo.at(unquote(match[3])), unquote(match[4]))
            if match := LFS_ROUTE.fullmatch(request.path):
                self._authenticate(request)
                self._visible(request, match[1] or "model", match[2])
                return self._lfs_batch(request)
            if request.method == "PUT" and request.path.startswith("/lfs/"):
                self._lfs_objects[sha256(request.body)] = request.body
                return Reply(b"")
            method = "get" if request.method == "HEAD" else request.method.lower()
            if match := API_ROUTE.fullmatch(request.path):
                action = match[3] or "revision"
                if method != "get":
                    self._authenticate(request)
                repo = self._visible(request, match[1], match[2])
                arguments = [repo, unquote(match[4] or "main"), unquote(match[5] or "")]
            elif re.match(r"/api/(models|datasets|spaces)/.|.*/resolve/", request.path):
                raise HubError(404, "Repository not found", "RepoNotFound")
            else:
                action, arguments = request.path.removeprefix("/api/"), []
            route = getattr(self, f"_{method}_{re.sub('[^a-z0-9]', '_', action)}", None)
            if route is None:
                # Not a 404: the client would take it for a missing repository or file and pass over it.
                raise HubError(501, f"The stand-in has no {request.method} {request.path}")
            return Reply(json.dumps(route(request, *arguments)).encode(), 200, {"Content-Type": "application/json"})

    def _authenticate(self, request: Request) -> None:
        sent = request.headers.get("Authorization")
        if sent is None:
            raise HubError(401, "Invalid username or password.")
        if sent != f"Bearer {self.token}":
            raise HubError(401, "Invalid credentials in Authorization header")

    def _visible(self, request: Request, kind: str, repo_id: str) -> Repo:
        repo = self.repos.get((kind, unquote(repo_id)))
        if repo is None:
            raise HubError(404, "Repository not found", "RepoNotFound")
        if repo.private and request.headers.get("Authorization") != f"Bearer {self.token}":
            raise HubError(401, "Repository not found", "RepoNotFound")
        return repo

    def _commit(self, repo: Repo, branch: str, files: dict[str, bytes], title: str, message: str = "") -> str:
        self._commit_count += 1
        sha = hashlib.sha1(f"{repo.url_path} {self._commit_count}".encode()).hexdigest()
        date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        repo.commits[sha] = Commit(sha, title, message, date, files)
        repo.branches[branch] = sha
        return sha

    def _file(self, request: Request, commit: Commit, path: str) -> Reply:
        if path not in commit.files:
            raise HubError(404, "Entry not found", "EntryNotFound", commit.sha)
        content = commit.files[path]
        if "Range" in request.headers:
            raise HubError(501, "The stand-in sends whole files only")
        return Reply(content, 200, {"ETag": f'"{blob_oid(content)}"', "X-Repo-Commit": commit.sha})

    def _lfs_batch(self, request: Request) -> Reply:
        objects = json.loads(request.body)["objects"]
        for item in objects:
            if item["oid"] not in self._lfs_objects:
                item["actions"] = {"upload": {"href": f"{self.endpoint}/lfs/{item['oid']}"}}
        return Reply(json.dumps({"transfer": "basic", "objects": objects}).encode())

    def _get_whoami_v2(self, request: Request) -> Any:
        self._authenticate(request)
        auth = {"type": "access_token", "accessToken": {"displayName": "stand-in", "role": "write"}}
        return {"type": "user", "id": "0", "name": self.user, "fullname": self.user, "orgs": [], "auth": auth}

    def _post_validate_yaml(self, request: Request) -> Any:
        return {"errors": [], "warnings": []}

    def _post_repos_create(self, request: Request) -> Any:
        self._authenticate(request)
        asked = json.loads(request.body)
        repo_id = f"{asked.get('organization') or self.user}/{asked['name']}"
        repo = Repo(asked.get("type") or "model", repo_id, asked.get("visibility") == "private")
        url = f"{self.endpoint}/{repo.url_path}"
        if (repo.kind, repo_id) in self.repos:
            raise HubError(409, f"You already created this {repo.kind} repo", url=url)
        self.repos[repo.kind, repo_id] = repo
        self._commit(repo, "main", {".gitattributes": b"*.bin filter=lfs\n"}, "initial commit")
        return {"url": url, "name": repo_id, "id": repo_id, "private": repo.private}

    def _get_revision(self, request: Request, repo: Repo, revision: str, _: str) -> Any:
        commit = repo.at(revision)
        siblings = [
            {"rfilename": path, "size": len(content), "blobId": blob_oid(content)}
            for path, content in sorted(commit.files.items())
        ]
        about = {"id": repo.id, "author": repo.id.split("/")[0], "sha": commit.sha, "lastModified": commit.date}
        state = {"private": repo.private, "gated": False, "disabled": False, "downloads": 0, "likes": 0, "tags": []}
        return {**about, **state, "createdAt": next(iter(repo.commits.values())).date, "siblings": siblings}

    def _get_tree(self, request: Request, repo: Repo, revision: str, folder: str) -> Any:
        commit = repo.at(revision)
        prefix = f"{folder.strip('/')}/" if folder else ""
        inside = [entry for path, entry in entries(commit).items() if path.startswith(prefix)]
        if prefix and not inside:
            raise HubError(404, f"{folder} does not exist on {revision!r}", "EntryNotFound", commit.sha)
        recursive = request.query.get("recursive", "").lower() in ("1", "true")
        return [entry for entry in inside if recursive or "/" not in entry["path"].removeprefix(prefix)]

    def _post_branch(self, request: Request, repo: Repo, branch: str, _: str) -> Any:
        if branch in repo.branches:
            raise HubError(409, f"Reference already exists: {branch}")
        repo.branches[branch] = repo.at(json.loads(request.body).get("startingPoint") or "main").sha
        return {}

    def _post_preupload(self, request: Request, repo: Repo, revision: str, _: str) -> Any:
        held = repo.at(revision).files
        answers = []
        for path in (file["path"] for file in json.loads(request.body)["files"]):
            lfs = path.endswith(LFS_SUFFIXES)
            oid = (sha256(held[path]) if lfs else blob_oid(held[path])) if path in held else None
            mode = "lfs" if lfs else "regular"
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return {"files": answers}

    def _post_commit(self, request: Request, repo: Repo, branch: str, _: str) -> Any:
        if "create_pr" in request.query:
            raise HubError(501, "The stand-in has no pull requests")
        if branch not in repo.branches:
            raise HubError(404, f"Invalid rev id: {branch}", "RevisionNotFound")
        head = repo.at(branch)
        files = dict(head.files)
        header: dict[str, str] = {}
        for item in map(json.loads, request.body.splitlines()):
            key, value = item["key"], item["value"]
            if key == "header":
                header = value
            elif key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = self._lfs_objects[value["oid"]]
            else:
                raise HubError(501, f"The stand-in cannot commit a {key!r} entry")
        if not head.sha.startswith(header.get("parentCommit", "")):
            raise HubError(412, "A commit has happened since. Please refresh and try again.")
        sha = self._commit(repo, branch, files, header["summary"], header.get("description", ""))
        return {"success": True, "commitOid": sha, "commitUrl": f"{self.endpoint}/{repo.url_path}/commit/{sha}"}


class _Handler(BaseHTTPRequestHandler):
    hub: HubStandIn
    protocol_version = "HTTP/1.1"
    # Headers and body are two writes: without this an answer may wait for a delayed ACK.
    disable_nagle_algorithm = True

    def _handle(self) -> None:
        # Read even if it will be refused: what is left over would be taken for the connection's next request.
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        url = urlsplit(self.path)
        try:
            reply = self.hub.answer(Request(self.command, url.path, dict(parse_qsl(url.query)), self.headers, body))
        except HubError as error:
            reply = error.reply
        except Exception as error:  # 501, because the client would keep retrying a 500
            reply = HubError(501, f"The stand-in failed: {error!r}").reply
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body)

    do_HEAD = do_GET = do_POST = do_PUT = do_DELETE = _handle

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the test output quiet; `HubStandIn.requests` is the log."""
