#!/usr/bin/env python3
"""The parts of .ci/cluster that are no shell: image archives, the pods of the test, its clients,
and the reports of upstream's tests.

image OUT NAMES ENTRYPOINT USER LAYER...  an archive that containerd imports. Commas separate names.
                                         ENTRYPOINT is a list in JSON, or a list of two: what runs,
                                         and the arguments that a pod may replace. LAYER is a tar
                                         archive, or PATH=FILE or PATH=->TARGET for a last layer
                                         with these files and links
blocks FILE SECTION FOLDER               writes each block of commands of a section of a page
serve NAME                               a pod: HTTP on port 8080, echo on port 9000
dns                                      a pod: answers for Services as the DNS of a cluster does
load STOP OUT TARGET...                  sends requests until the file STOP exists
rules PROGRAM [NAMESPACE]                sorts what PROGRAM (nft or iptables-save) prints on
                                         standard input, so that two nodes with the same rules have
                                         the same lines. What kube-proxy writes for Services of
                                         NAMESPACE is left out
churn SECONDS KUBECTL LOG COMMAND...     changes Services and EndpointSlices at random, and runs
                                         COMMAND (headgatectl shadow) again and again; ends with 1
                                         if KUBECTL failed
report OUT...                            prints one line for each target; ends with 1 on a failure
answers SINCE SECONDS TARGET...          waits until each target answers; prints how long it took
ran REPORT                               prints the sums of a JUnit report of upstream's e2e.test;
                                         ends with 1 if the run was cut short
conformance EXCEPTIONS FOLDER OUT KUBERNETES HEADGATE
                                         writes a page from the reports MODE.xml and MODE.*.xml;
                                         ends with 1 if EXCEPTIONS has no reason for a failure

A TARGET is LABEL=http:ADDRESS, hold:ADDRESS (one connection that stays), tls:ADDRESS (a handshake),
or dns:ADDRESS. ADDRESS is HOST:PORT, with brackets around IPv6.
"""

import hashlib
import io
import json
import os
import re
import secrets
import signal
import socket
import socketserver
import ssl
import struct
import subprocess
import sys
import tarfile
import textwrap
import threading
import time
import urllib.request
import xml.etree.ElementTree


def image(out, names, entrypoint, user, *layers):
    """Writes an archive in the format of `docker save`."""
    contents = [layer for layer in layers if "=" not in layer]
    files = [layer.split("=", 1) for layer in layers if "=" in layer]
    last = io.BytesIO()
    with tarfile.open(fileobj=last, mode="w") as tar:
        for path, source in files:
            entry = tarfile.TarInfo(path.lstrip("/"))
            if source.startswith("->"):
                entry.type, entry.linkname = tarfile.SYMTYPE, source.removeprefix("->")
                tar.addfile(entry)
                continue
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
        entrypoint = json.loads(entrypoint)
        arguments = []
        if entrypoint and isinstance(entrypoint[0], list):
            entrypoint, arguments = entrypoint
        config = json.dumps({
            "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine],
            "os": "linux",
            "config": {"Entrypoint": entrypoint, "Cmd": arguments, "Env": environment,
                       "User": user},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest in digests]},
        }).encode()
        config_name = hashlib.sha256(config).hexdigest() + ".json"
        add(config_name, len(config), io.BytesIO(config))
        manifest = [{"Config": config_name, "RepoTags": names.split(","),
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
    # Addresses of names, and names for which another name stands (type ExternalName).
    names, others = {}, {}

    def refresh():
        with open(f"{folder}/token", encoding="utf-8") as file:
            token = file.read()
        request = urllib.request.Request(f"https://{host}/api/v1/services",
                                         headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, context=context, timeout=5) as answer:
            services = json.load(answer)["items"]
        new, new_others = {}, {}
        for service in services:
            meta, spec = service["metadata"], service["spec"]
            name = f"{meta['name']}.{meta['namespace']}.svc.cluster.local"
            new[name] = [ip for ip in spec.get("clusterIPs", []) if ip != "None"]
            if spec.get("type") == "ExternalName":
                new_others[name] = spec["externalName"].lower().rstrip(".")
        names.clear()
        names.update(new)
        others.clear()
        others.update(new_others)

    def answer(query):
        at, labels = 12, []
        while query[at]:
            labels.append(query[at + 1:at + 1 + query[at]].decode().lower())
            at += 1 + query[at]
        kind = struct.unpack(">H", query[at + 1:at + 3])[0]
        name, owner, records = ".".join(labels), b"\xc0\x0c", []
        addresses = names.get(name)
        if name in others:
            other = [label.encode() for label in others[name].split(".")]
            other = b"".join(bytes([len(label)]) + label for label in other) + b"\0"
            records.append(owner + struct.pack(">HHIH", 5, 1, 5, len(other)) + other)
            owner, addresses = other, names.get(others[name], [])
        for address in addresses or []:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            if kind == {socket.AF_INET: 1, socket.AF_INET6: 28}[family]:
                data = socket.inet_pton(family, address)
                records.append(owner + struct.pack(">HHIH", kind, 1, 5, len(data)) + data)
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
    """Opens 60 connections a second to each target, and holds one to those of kind hold."""
    results, lock = [], threading.Lock()
    rate, clients = 60, 3

    def requests(result, kind, address):
        began = turn = time.time()
        while not os.path.exists(stop):
            start, fault = time.time(), None
            try:
                request(kind, address, 5)
            except OSError as error:
                at = time.strftime("%H:%M:%S", time.localtime(start))
                fault = f"{at} {error} after {time.time() - start:.2f} s"
            with lock:
                result["seconds"] = max(result.get("seconds", 0), start - began)
                result["slowest"] = max(result["slowest"], time.time() - start)
                # After a second, a kernel sends the first packet of a connection again.
                if time.time() - start > 0.9:
                    result["again"].append(time.strftime("%H:%M:%S", time.localtime(start)))
                if fault:
                    result["errors"].append(fault)
                else:
                    result["succeeded"] += 1
            # What a slow machine misses in more than a second is not caught up later.
            turn = max(turn + clients / rate, time.time() - 1)
            time.sleep(max(0, turn - time.time()))

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
        result = {"label": label, "kind": kind, "succeeded": 0, "slowest": 0.0, "errors": [],
                  "again": []}
        results.append(result)
        # One client after the other would wait for a slow answer.
        for _ in range(1 if kind == "hold" else clients):
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


def chains_of_iptables(lines):
    """The lines of each chain that iptables-save prints. The name of the program is before each."""
    chains, table = {}, ""
    for line in lines:
        words = [*line.split(), ""]
        if words[1].startswith("*"):
            table = line
        elif words[1].startswith(":"):
            chains.setdefault(f"{table} {words[1][1:]}", []).insert(0, line)
        elif words[1] == "-A":
            chains.setdefault(f"{table} {words[2]}", []).append(line)
    return chains


def chains_of_nft(lines):
    """The lines of each chain, set and map that nft lists."""
    chains, table, chain = {}, "", ""
    for line in lines:
        words = line.split()
        if line.startswith("table "):
            # iptables-save shows these tables with their comments.
            known = words[1] in ("ip", "ip6") and words[2] in ("nat", "filter", "mangle", "raw",
                                                               "security")
            table = "" if known else line
        elif not table or line in ("}", "\t}", ""):
            chain = ""
        elif re.match(r"\t\w.*{$", line):
            chain = f"{table} {line.strip()}"
            chains[chain] = []
        else:
            chains.setdefault(chain or table, []).append(line)
    return chains


def rules(program, namespace=""):
    """Chains, sets and maps in the order of their names, elements and jumps to Services sorted.
    The order of other rules in a chain stays."""
    loose = re.compile(r"(KUBE-)?(SERVICES|NODEPORTS|EXTERNAL-SERVICES|FIREWALL|PROXY-FIREWALL)\b",
                       re.IGNORECASE)
    parse = {"nft": chains_of_nft, "iptables-save": chains_of_iptables}[program]
    chains = parse(line.rstrip() for line in sys.stdin)
    left_out = set()
    if namespace:
        texts = {name: "\n".join(body) for name, body in chains.items()}
        left_out = {name for name, text in texts.items()
                    if f"{namespace}/" in name or re.search("KUBE-(SVC|SEP|EXT)", name)
                    and f"{namespace}/" in text}
    gone = {name.rstrip(" {").split()[-1] for name in left_out}
    # Elements of sets of kube-proxy's mode nftables that name no Service: ClusterIPs, and endpoints
    # that reach themselves.
    unnamed = set()
    if namespace:
        maps = "\n".join(text for name, text in texts.items() if " map " in name)
        unnamed.update(re.findall(rf"(\S+) \. \w+ \. \d+ : goto \S*-{namespace}/", maps))
    for text in (texts[name] for name in left_out):
        for protocol, ends in re.findall(r"l4proto (\w+) dnat .* map {(.*)}", text):
            unnamed.update(f"{address} . {address} . {protocol} . {port}" for address, port in
                           re.findall(r": (\S+) \. (\d+)", ends))
    for name in sorted(chains.keys() - left_out):
        body = chains[name]
        text = " ".join(body)
        if "elements = {" in text:
            before, elements = text.split("elements = {", 1)
            elements = re.split(r",\s|}", elements)
            body = [before, *sorted(filter(None, (element.strip() for element in elements)))]
        elif loose.search(name):
            body = sorted(body)
        body = [line for line in body if not namespace
                or f"{namespace}/" not in line and not gone.intersection(line.split())
                and line.strip() not in unnamed]
        print(name, *body, sep="\n")


def churn(seconds, kubectl, log, *command):
    """Changes some of 20 Services and their EndpointSlices again and again. `command` compares
    meanwhile. Prints sums. The Services are gone at the end."""
    random = secrets.SystemRandom()
    end = time.time() + float(seconds)
    changes, failures, stop = 0, [], threading.Event()
    counts = {"agrees": 0, "differs": 0, "unverified": 0}

    def compare():
        with open(log, "w", encoding="utf-8") as file:
            while not stop.wait(5):
                printed = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                         text=True, check=False).stdout
                file.write(f"{time.strftime('%H:%M:%S')}\n{printed}")
                file.flush()
                for state in counts:
                    counts[state] += len(re.findall(rf"^\S+ +{state}\b", printed, re.MULTILINE))

    def objects(number):
        """A Service without a selector, and its endpoints: the addresses belong to no pod."""
        name = f"churn-{number}"
        # The family of a Service never changes.
        family = ["IPv4", "IPv6"][number % 2]
        prefix = "10.244.9." if family == "IPv4" else "fd00:10:244:9::"
        ports = [{"name": f"p{port}", "port": 80 + port, "targetPort": 8080 + port,
                  "protocol": random.choice(["TCP", "UDP"])}
                 for port in range(random.randint(1, 3))]
        spec = {"type": random.choice(["ClusterIP", "ClusterIP", "NodePort", "LoadBalancer"]),
                "ipFamilies": [family], "ipFamilyPolicy": "SingleStack", "ports": ports,
                "sessionAffinity": random.choice(["None", "None", "ClientIP"])}
        if spec["type"] != "ClusterIP":
            spec["externalTrafficPolicy"] = random.choice(["Cluster", "Local"])
        meta = {"name": name, "namespace": "load", "labels": {"churn": "yes"}}
        endpoints = [{"addresses": [f"{prefix}{random.randint(1, 250)}"],
                      "nodeName": random.choice(["node-1", "node-2"]),
                      "conditions": {"ready": random.random() < 0.8}}
                     for _ in range(random.randint(0, 4))]
        labels = {"churn": "yes", "kubernetes.io/service-name": name}
        yield {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": spec}
        yield {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
               "metadata": {"name": f"{name}-{family.lower()}", "namespace": "load",
                            "labels": labels},
               "addressType": family, "endpoints": endpoints,
               "ports": [{"name": port["name"], "port": port["targetPort"],
                          "protocol": port["protocol"]} for port in ports]}

    def run(*arguments, text=None):
        done = subprocess.run([kubectl, "-n", "load", *arguments], input=text, text=True,
                              check=False, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if done.returncode:
            failures.append(f"kubectl {arguments[0]}: {done.stderr.strip()}")

    comparer = threading.Thread(target=compare)
    comparer.start()
    while time.time() < end:
        numbers = random.sample(range(20), 5)
        gone = [number for number in numbers if random.random() < 0.3]
        if gone:
            run("delete", "--ignore-not-found", "service", *[f"churn-{number}" for number in gone])
        items = [item for number in numbers if number not in gone for item in objects(number)]
        if items:
            run("apply", "--server-side", "--force-conflicts", "-f", "-",
                text=json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
        changes += len(gone) + len(items)
    # What changed last is compared after a minute at the latest.
    time.sleep(65)
    stop.set()
    comparer.join()
    run("delete", "service,endpointslice", "-l", "churn=yes")
    print(f"{changes} changes in {seconds} s; nodes were compared {sum(counts.values())} times, "
          f"{counts['differs']} with differences, {counts['unverified']} unverified; "
          f"kubectl failed {len(failures)} times")
    if failures:
        print(*failures[:10], sep="\n", file=sys.stderr)
    sys.exit(len(failures) > 0)


def report(*files):
    failed, ways = 0, {}
    for file in files:
        with open(file, encoding="utf-8") as content:
            results = json.load(content)
        for result in results:
            label, errors = result["label"], result["errors"]
            slowest = f"slowest {1000 * result['slowest']:.0f} ms"
            if result.get("again"):
                times = " ".join(result["again"][:5])
                slowest += f", {len(result['again'])} over 900 ms: {times}"
            if result["kind"] == "hold":
                state = "broke" if errors else "stays open"
                print(f"{label}: the connection {state}, {result['succeeded']} echoes, {slowest}")
            else:
                total = result["succeeded"] + len(errors)
                rate = total / max(result.get("seconds", 0), 1)
                print(f"{label}: {len(errors)} of {total} requests failed, {rate:.0f}/s, {slowest}")
                # "a pod of node-2, ClusterIP of IPv6" is one way of those by a ClusterIP.
                way = label.split(", ")[-1].split(" of ")[0]
                sums = zip(ways.get(way, (0, 0, 0)), (len(errors), total, rate))
                ways[way] = [before + more for before, more in sums]
            for error in errors[:3]:
                print(f"  {error}")
            failed += len(errors) + (result["succeeded"] == 0)
    for way, (errors, total, rate) in ways.items():
        print(f"in all, {way}: {errors} of {total} requests failed, {rate:.0f}/s")
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


class Report:
    """A JUnit report of upstream's e2e.test."""

    def __init__(self, file):
        suite = xml.etree.ElementTree.parse(file).getroot().find("testsuite")
        self.started, self.seconds = suite.get("timestamp"), float(suite.get("time"))
        # From the name of a spec to its state, and the first line of its failure or its reason to
        # skip itself.
        self.specs = {}
        # Why the report is no result.
        self.cut = ""
        for setting in suite.iter("property"):
            if setting.get("name") == "SpecialSuiteFailureReason":
                self.cut = setting.get("value") or ""
        for case in suite.iter("testcase"):
            self.note(case)
        if not self.specs:
            self.cut = self.cut or "no spec ran"

    def note(self, case):
        skipped = case.find("skipped")
        fault = case.find("failure")
        fault = case.find("error") if fault is None else fault
        line = ""
        if fault is not None:
            lines = [line.strip() for line in (fault.text or "").splitlines()]
            line = next((line for line in lines if line), "").removeprefix("[FAILED] ")
        if not case.get("name").startswith("[It] "):
            # Before the first spec, or after the last one.
            if fault is not None:
                self.cut = self.cut or f"{case.get('name')}: {line}"
            return
        if case.get("status") in ("aborted", "interrupted"):
            self.cut = self.cut or f"{case.get('name')} was {case.get('status')}"
        if skipped is not None:
            # Specs that were not asked for are in the report, too, but without a reason.
            reason = skipped.get("message").removeprefix("skipped").removeprefix(" - ")
            if reason and reason != "pending":
                self.specs[short(case.get("name"))] = "skipped", " ".join(reason.split())
        elif fault is not None:
            self.specs[short(case.get("name"))] = "FAIL", line
        else:
            self.specs[short(case.get("name"))] = "pass", ""


def short(name):
    """The name of a spec without its tags, such as [sig-network]. A feature may be all of a name."""
    name = re.sub(r"\[Feature:([^\]]*)\]", r" \1 ", name)
    return " ".join(re.sub(r"\[[^\]]*\]", " ", name).split())


def sums(specs):
    states = [state for state, _ in specs.values()]
    return [states.count(state) for state in ("pass", "FAIL", "skipped")]


def ran(file):
    try:
        report = Report(file)
    except (OSError, xml.etree.ElementTree.ParseError) as error:
        print(f"there is no whole report: {error}")
        sys.exit(1)
    if report.cut:
        print(report.cut)
        sys.exit(1)
    passed, failed, skipped = sums(report.specs)
    minutes = report.seconds / 60
    print(f"{passed} specs passed, {failed} failed, {skipped} skipped, in {minutes:.0f} minutes")


MODES = {"kube-proxy": "kube-proxy nftables", "nftables": "Headgate nftables",
         "iptables": "Headgate iptables", "userspace": "Headgate userspace"}


def reasons(file):
    """The lines SPEC | MODE | REASON of a file. SPEC is a part of a name; MODE may be *."""
    found = []
    with open(file, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            parts = [part.strip() for part in line.split("|", 2)]
            if line.startswith("#") or not line.strip():
                continue
            if len(parts) < 3 or not all(parts) or parts[1] not in [*MODES, "*"]:
                sys.exit(f"{file}:{number}: not SPEC | MODE | REASON: {line.strip()}")
            found.append(parts)
    return found


def conformance(exceptions, folder, out, kubernetes, headgate):
    results = {mode: {} for mode in MODES}
    reports = {mode: [] for mode in MODES}
    for name in os.listdir(folder):
        mode = name.split(".")[0]
        if name.endswith(".xml") and mode in MODES:
            reports[mode].append(Report(os.path.join(folder, name)))
    for mode, runs in reports.items():
        # The last result of a spec counts.
        runs.sort(key=lambda run: run.started)
        for run in runs:
            results[mode].update(run.specs)
    names = sorted({name for specs in results.values() for name in specs})
    states = {name: [specs.get(name, ("-", ""))[0] for specs in results.values()] for name in names}

    known, failures, unexplained = reasons(exceptions), [], []
    for name in names:
        for mode, specs in results.items():
            state, line = specs.get(name, ("-", ""))
            fitting = [entry for entry in known if entry[0] in name and entry[1] in (mode, "*")]
            if state == "FAIL" and fitting:
                failures.append([name, MODES[mode], fitting[0][2]])
            elif state == "FAIL":
                unexplained.append(f"{MODES[mode]}: {name}: {line}")
            elif state == "pass":
                for entry in fitting:
                    print(f"{MODES[mode]}: {name} passes; no exception is needed: {entry[2]}")
    for mode, runs in reports.items():
        if runs:
            passed, failed, skipped = sums(results[mode])
            print(f"{MODES[mode]}: {passed} passed, {failed} failed, {skipped} skipped")
    if unexplained:
        print(f"these failures have no reason in {exceptions}:", *unexplained, sep="\n")
        sys.exit(1)

    def prose(text):
        text = " ".join(text.split())
        return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)

    def table(header, rows, numbers=False):
        rows = [[cell.replace("|", "\\|") for cell in row] for row in rows]
        rule = ["---"] + ["---:" if numbers else "---"] * (len(header) - 1)
        return "\n".join("| " + " | ".join(row) + " |" for row in [header, rule, *rows])

    def by_mode(text):
        return [text(runs, results[mode]) if runs else "-" for mode, runs in reports.items()]

    head = [
        ["date", *by_mode(lambda runs, _: runs[-1].started[:10])],
        ["passed", *by_mode(lambda _, specs: str(sums(specs)[0]))],
        ["failed", *by_mode(lambda _, specs: str(sums(specs)[1]))],
        ["skipped", *by_mode(lambda _, specs: str(sums(specs)[2]))],
        ["minutes", *by_mode(lambda runs, _: f"{sum(run.seconds for run in runs) / 60:.0f}")],
    ]
    ran_in_a_mode = [name for name in names if {"pass", "FAIL"} & set(states[name])]
    skipped = {}
    for name in names:
        if name not in ran_in_a_mode:
            skipped[name] = next(specs[name][1] for specs in results.values() if name in specs)
    parts = [
        "# Conformance",
        prose("""After reading this page you know which of upstream's tests of Services pass with
              kube-proxy and with Headgate, why the others fail, and how to repeat the runs."""),
        prose(f"""Kubernetes {kubernetes}, Headgate {headgate}. Each column is a run of upstream's
              specs in a cluster with two nodes on one machine and both IP families. The Helm chart
              installed Headgate. [Testing](testing.md#upstreams-tests) says which specs were asked
              for, and which were not, and why. `.ci/cluster` wrote this page from the reports of
              the runs."""),
        table(["", *MODES.values()], head, numbers=True),
        "To repeat the runs and write this page again:",
        '```sh\nmake cluster BIN=FOLDER STEPS="images up e2e"\n```',
        prose("""FOLDER has the programs of a Kubernetes release, and programs of its tests, which
              [you can build](testing.md#upstreams-tests). A run that is complete is not repeated
              as long as the programs are the same: delete `target/cluster/e2e` first."""),
        "## Results",
        prose("""Specs that skipped themselves in all runs are below. `-` means that a spec did not
              run."""),
        table(["spec", *MODES.values()], [[name, *states[name]] for name in ran_in_a_mode]),
        "## Exceptions",
        prose("""A failure needs a reason in `.ci/conformance-exceptions`, or this page cannot be
              written."""),
        table(["spec", "fails with", "reason"], failures) if failures else "No spec failed.",
        "## Skipped in all runs",
        table(["spec", "reason"], list(skipped.items())) if skipped else "No spec skipped itself.",
    ]
    with open(out, "w", encoding="utf-8") as page:
        page.write("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    actions = [image, blocks, serve, dns, load, rules, churn, report, answers, ran,
               conformance]
    {action.__name__: action for action in actions}[sys.argv[1]](*sys.argv[2:])
