#!/usr/bin/env python3
"""The parts of .ci/cluster that are no shell: image archives, the pods of the test, and its clients.

image OUT NAME ENTRYPOINT USER LAYER...  an archive that containerd imports. LAYER is a tar archive,
                                         or PATH=FILE for a last layer with these files
blocks FILE SECTION FOLDER               writes each block of commands of a section of a page
serve NAME                               a pod: HTTP on port 8080, echo on port 9000
dns                                      a pod: answers for Services as the DNS of a cluster does
load STOP OUT TARGET...                  sends requests until the file STOP exists
report OUT...                            prints one line for each target; ends with 1 on a failure
answers SINCE SECONDS TARGET...          waits until each target answers; prints how long it took

A TARGET is LABEL=http:ADDRESS, hold:ADDRESS (one connection that stays), tls:ADDRESS (a handshake),
or dns:ADDRESS. ADDRESS is HOST:PORT, with brackets around IPv6.
"""

import hashlib
import io
import json
import os
import re
import signal
import socket
import socketserver
import ssl
import struct
import sys
import tarfile
import threading
import time
import urllib.request


def image(out, name, entrypoint, user, *layers):
    """Writes an archive in the format of `docker save`."""
    contents = [layer for layer in layers if "=" not in layer]
    files = [layer.split("=", 1) for layer in layers if "=" in layer]
    last = io.BytesIO()
    with tarfile.open(fileobj=last, mode="w") as tar:
        for path, source in files:
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.size, entry.mode = os.path.getsize(source), 0o755
            with open(source, "rb") as content:
                tar.addfile(entry, content)
    with tarfile.open(out, "w") as archive:

        def add(path, size, content):
            entry = tarfile.TarInfo(path)
            entry.size = size
            archive.addfile(entry, content)

        digests = []
        for layer in contents:
            with open(layer, "rb") as content:
                digests.append(hashlib.file_digest(content, "sha256").hexdigest())
                content.seek(0)
                add(f"{digests[-1]}.tar", os.path.getsize(layer), content)
        if files:
            digests.append(hashlib.sha256(last.getvalue()).hexdigest())
            last.seek(0)
            add(f"{digests[-1]}.tar", len(last.getvalue()), last)
        environment = ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]
        config = json.dumps({
            "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine],
            "os": "linux",
            "config": {"Entrypoint": json.loads(entrypoint), "Env": environment, "User": user},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest in digests]},
        }).encode()
        config_name = hashlib.sha256(config).hexdigest() + ".json"
        add(config_name, len(config), io.BytesIO(config))
        manifest = [{"Config": config_name, "RepoTags": [name],
                     "Layers": [f"{digest}.tar" for digest in digests]}]
        manifest = json.dumps(manifest).encode()
        add("manifest.json", len(manifest), io.BytesIO(manifest))


def blocks(file, section, folder):
    """Writes the blocks ```sh of a section to FOLDER/01.sh and so on."""
    with open(file, encoding="utf-8") as page:
        text = page.read()
    level = re.search(rf"^(#+) {re.escape(section)}$", text, re.MULTILINE)
    if not level:
        sys.exit(f"{file} has no section {section}")
    rest = text[level.end():]
    end = re.search(rf"^#{{1,{len(level[1])}}} ", re.sub(r"```.*?```", lambda m: " " * len(m[0]),
                                                        rest, flags=re.DOTALL), re.MULTILINE)
    rest = rest[:end.start()] if end else rest
    os.makedirs(folder, exist_ok=True)
    found = re.findall(r"^( *)```sh\n(.*?)^ *```$", rest, re.MULTILINE | re.DOTALL)
    for number, (indent, body) in enumerate(found, 1):
        with open(f"{folder}/{number:02}.sh", "w", encoding="utf-8") as block:
            block.write("".join(line.removeprefix(indent) for line in body.splitlines(True)))


def serve(name):
    """Answers HTTP requests with the name of the pod, and echoes lines on another port."""

    class Http(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.settimeout(5)
            self.request.recv(4096)
            body = f"{name}\n".encode()
            self.request.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    class Echo(socketserver.BaseRequestHandler):
        def handle(self):
            while data := self.request.recv(4096):
                self.request.sendall(data)

    class Server(socketserver.ThreadingTCPServer):
        address_family = socket.AF_INET6
        allow_reuse_address = True
        daemon_threads = True
        request_queue_size = 256

        def handle_error(self, request, client_address):
            pass  # The client has gone.

    # As most programs do, it ends at once.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    for port, handler in [(8080, Http), (9000, Echo)]:
        server = Server(("::", port), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    signal.pause()


def dns():
    """Answers for SERVICE.NAMESPACE.svc.cluster.local. It reaches the API server by its Service."""
    folder = "/var/run/secrets/kubernetes.io/serviceaccount"
    host = os.environ["KUBERNETES_SERVICE_HOST"]
    context = ssl.create_default_context(cafile=f"{folder}/ca.crt")
    names = {}

    def refresh():
        with open(f"{folder}/token", encoding="utf-8") as file:
            token = file.read()
        request = urllib.request.Request(f"https://{host}/api/v1/services",
                                         headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, context=context, timeout=5) as answer:
            services = json.load(answer)["items"]
        new = {}
        for service in services:
            meta, spec = service["metadata"], service["spec"]
            name = f"{meta['name']}.{meta['namespace']}.svc.cluster.local"
            new[name] = [ip for ip in spec.get("clusterIPs", []) if ip != "None"]
        names.clear()
        names.update(new)

    def answer(query):
        at, labels = 12, []
        while query[at]:
            labels.append(query[at + 1:at + 1 + query[at]].decode().lower())
            at += 1 + query[at]
        kind = struct.unpack(">H", query[at + 1:at + 3])[0]
        addresses = names.get(".".join(labels))
        records = []
        for address in addresses or []:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            if kind == {socket.AF_INET: 1, socket.AF_INET6: 28}[family]:
                data = socket.inet_pton(family, address)
                records.append(b"\xc0\x0c" + struct.pack(">HHIH", kind, 1, 5, len(data)) + data)
        flags = 0x8580 | (0 if addresses is not None else 3)
        head = query[:2] + struct.pack(">HHHHH", flags, 1, len(records), 0, 0)
        return head + query[12:at + 5] + b"".join(records)

    while not names:
        try:
            refresh()
        except OSError as error:
            print(f"the API server does not answer: {error}", flush=True)
            time.sleep(0.5)

    def keep():
        while True:
            time.sleep(2)
            try:
                refresh()
            except OSError as error:
                print(f"the API server does not answer: {error}", flush=True)

    threading.Thread(target=keep, daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    # The probe of readiness connects here.
    ready = socket.create_server(("::", 53), family=socket.AF_INET6, dualstack_ipv6=True)
    threading.Thread(target=lambda: [ready.accept()[0].close() for _ in iter(int, 1)],
                     daemon=True).start()
    server = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    server.bind(("::", 53))
    while True:
        query, client = server.recvfrom(4096)
        try:
            server.sendto(answer(query), client)
        except (OSError, IndexError, ValueError, struct.error) as error:
            print(error, flush=True)


def split(target):
    label, rest = target.split("=", 1)
    kind, address = rest.split(":", 1)
    host, port = address.rsplit(":", 1)
    return label, kind, (host.strip("[]"), int(port))


def request(kind, address, limit):
    """One request on a connection of its own."""
    if kind == "dns":
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as client:
            client.settimeout(limit)
            client.connect(address)
            query = struct.pack(">HHHHHH", os.getpid() & 0xffff, 0x100, 1, 0, 0, 0)
            for label in "kubernetes.default.svc.cluster.local".split("."):
                query += bytes([len(label)]) + label.encode()
            client.send(query + b"\0" + struct.pack(">HH", 1, 1))
            if client.recv(4096)[3] & 15:
                raise OSError("the name server does not know the name")
        return
    with socket.create_connection(address, limit) as client:
        if kind == "tls":
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.wrap_socket(client).close()
            return
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
        received = b""
        while data := client.recv(4096):
            received += data
        if not received.startswith(b"HTTP/1.0 200 ") or not received.endswith(b"\n"):
            raise OSError(f"a wrong answer of {len(received)} bytes")


def load(stop, out, *targets):
    """Opens about 25 connections a second to each target, and holds one to those of kind hold."""
    results = []

    def requests(result, kind, address):
        while not os.path.exists(stop):
            start = time.time()
            try:
                request(kind, address, 5)
                result["succeeded"] += 1
            except OSError as error:
                at = time.strftime("%H:%M:%S", time.localtime(start))
                result["errors"].append(f"{at} {error} after {time.time() - start:.2f} s")
            result["slowest"] = max(result["slowest"], time.time() - start)
            time.sleep(0.04)

    def hold(result, _, address):
        try:
            with socket.create_connection(address, 5) as client:
                client.settimeout(10)
                while not os.path.exists(stop):
                    start = time.time()
                    client.sendall(b"here\n")
                    if client.recv(4096) != b"here\n":
                        raise OSError("the connection was closed")
                    result["succeeded"] += 1
                    result["slowest"] = max(result["slowest"], time.time() - start)
                    time.sleep(0.2)
        except OSError as error:
            result["errors"].append(f"{time.strftime('%H:%M:%S')} {error}")

    threads = []
    for target in targets:
        label, kind, address = split(target)
        result = {"label": label, "kind": kind, "succeeded": 0, "slowest": 0.0, "errors": []}
        results.append(result)
        threads.append(threading.Thread(target=hold if kind == "hold" else requests,
                                        args=(result, kind, address)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    text = json.dumps(results)
    if out == "-":
        print(text)
    else:
        with open(out, "w", encoding="utf-8") as file:
            file.write(text)


def report(*files):
    failed = 0
    for file in files:
        with open(file, encoding="utf-8") as content:
            results = json.load(content)
        for result in results:
            label, errors = result["label"], result["errors"]
            slowest = f"slowest {1000 * result['slowest']:.0f} ms"
            if result["kind"] == "hold":
                state = "broke" if errors else "stays open"
                print(f"{label}: the connection {state}, {result['succeeded']} echoes, {slowest}")
            else:
                total = result["succeeded"] + len(errors)
                print(f"{label}: {len(errors)} of {total} requests failed, {slowest}")
            for error in errors[:3]:
                print(f"  {error}")
            failed += len(errors) + (result["succeeded"] == 0)
    sys.exit(failed > 0)


def answers(since, seconds, *targets):
    failed = False
    for target in targets:
        label, kind, address = split(target)
        while True:
            try:
                request(kind, address, 0.5)
                print(f"{label}: answers after {time.time() - float(since):.1f} s", flush=True)
                break
            except OSError as error:
                if time.time() - float(since) > float(seconds):
                    print(f"{label}: no answer after {seconds} s: {error}", flush=True)
                    failed = True
                    break
                time.sleep(0.1)
    sys.exit(failed)


if __name__ == "__main__":
    actions = [image, blocks, serve, dns, load, report, answers]
    {action.__name__: action for action in actions}[sys.argv[1]](*sys.argv[2:])
