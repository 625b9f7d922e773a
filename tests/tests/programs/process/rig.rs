//! One node in a network namespace, with its programs.

use std::{
    fs::{self, File},
    io::{Read as _, Write as _},
    net::{Ipv6Addr, TcpListener},
    net::{SocketAddr, TcpStream},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use headgate_tests::apiserver::ApiServer;
use headgate_tests::testbed::{
    Namespace, page,
    process::{before_others, program},
    spawn::refuse_ipv6_sockets,
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tempfile::TempDir;

/// The longest wait for an expected state. Only a failing test waits this long.
const GUARD: Duration = Duration::from_secs(60);
const HEALTH: u16 = 10256;
const METRICS: u16 = 10249;
const REPLICA: u16 = 7480;
/// The addresses of a control plane without TLS.
pub(super) const REPLICA_OPTIONS: [&str; 3] =
    ["--listen=127.0.0.1:7443", "--insecure-loopback", "--metrics-listen=127.0.0.1:7480"];

/// Calls `attempt` until it succeeds. After [`GUARD`], panics with `what` and the last error.
pub(super) fn eventually<T>(what: &str, mut attempt: impl FnMut() -> Result<T, String>) -> T {
    let deadline = Instant::now() + GUARD;
    loop {
        match attempt() {
            Ok(found) => return found,
            Err(seen) => assert!(Instant::now() < deadline, "not seen in time: {what}; last seen: {seen}"),
        }
        std::thread::sleep(Duration::from_millis(30));
    }
}

/// A running program. Dropping the value kills the process.
pub(super) struct Program {
    child: Child,
    log: PathBuf,
}

impl Program {
    fn start(namespace: &Namespace, mut command: Command, log: PathBuf) -> Self {
        let file = || File::options().create(true).append(true).open(&log).unwrap();
        command.stdin(Stdio::null()).stdout(file()).stderr(file());
        Self { child: namespace.spawn(command).unwrap(), log }
    }

    /// Waits until the program ends. Returns its exit status and its whole output.
    pub(super) fn ended(mut self) -> (ExitStatus, String) {
        let status = eventually("the program ends", || {
            let log = self.log();
            self.child.try_wait().unwrap().ok_or(log)
        });
        (status, self.log())
    }

    /// Sends a signal.
    pub(super) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().cast_signed()), signal).unwrap();
    }

    /// Sends SIGTERM and waits until the program ends.
    pub(super) fn terminate(self) -> (ExitStatus, String) {
        self.signal(Signal::SIGTERM);
        self.ended()
    }

    /// The whole output of the program.
    pub(super) fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap()
    }

    /// Waits until the output contains a text.
    pub(super) fn until_logged(&self, text: &str) {
        eventually(text, || if self.log().contains(text) { Ok(()) } else { Err(self.log()) });
    }

    /// The resident memory of the program.
    pub(super) fn resident_bytes(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        resident.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    }

    /// Waits until a thread that sleeps between its turns has done a whole turn, from now on.
    pub(super) fn until_whole_turn(&self, thread: &str) {
        let sleeps = || -> Result<u64, String> {
            let tasks = fs::read_dir(format!("/proc/{}/task", self.child.id())).map_err(|error| error.to_string())?;
            for task in tasks.flatten() {
                let status = fs::read_to_string(task.path().join("status")).unwrap_or_default();
                let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
                if field("Name:") == Some(thread) {
                    return field("voluntary_ctxt_switches:").and_then(|text| text.parse().ok()).ok_or(status.clone());
                }
            }
            Err(format!("there is no thread {thread}"))
        };
        let before = eventually("the thread runs", sleeps);
        // The thread may sleep before and after the turn, and for a lock of the kernel.
        eventually("the thread has done its work", || match sleeps()? {
            now if now >= before + 4 => Ok(()),
            now => Err(format!("it has slept {} times", now - before)),
        });
    }

    pub(super) fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if self.is_running() {
            self.child.kill().unwrap();
            self.child.wait().unwrap();
        }
        if std::thread::panicking() {
            eprintln!("--- {}\n{}", self.log.display(), self.log());
        }
    }
}

/// A node called node-a. The fields are dropped in order: the control plane, the namespace, and the
/// folder.
pub(super) struct Rig {
    control_plane: Option<Program>,
    namespace: Namespace,
    folder: TempDir,
}

impl Rig {
    /// Creates a node with the addresses 192.0.2.11 and 2001:db8::11. No program runs on the node.
    pub(super) fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let namespace = Namespace::for_test(&format!("process-{number}")).unwrap();
        let links = "link set lo up\nlink add uplink type veth peer name far\nlink set uplink up\nlink set far up\n\
                     addr add 192.0.2.11/24 dev uplink\naddr add 2001:db8::11/64 dev uplink nodad\n";
        namespace.ip_batch(links).unwrap();
        let folder = tempfile::tempdir().unwrap();
        for name in ["manifests", "tools"] {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        // A control plane does not begin to serve an empty folder.
        fs::write(folder.path().join("manifests/none.yaml"), "apiVersion: v1\nkind: List\nitems: []\n").unwrap();
        Self { control_plane: None, namespace, folder }
    }

    /// Creates a node and starts a control plane that serves these manifests.
    pub(super) fn serving(manifests: &[(&str, String)]) -> Self {
        let mut rig = Self::new();
        manifests.iter().for_each(|(name, text)| rig.put(name, text));
        let source = rig.manifests();
        let options = [&[source.as_str()], &REPLICA_OPTIONS[..]].concat();
        rig.control_plane = Some(rig.start("headgate-control-plane", &options, &[], "control-plane.log"));
        rig
    }

    /// Creates a node that serves [`node`], and the Service `web` with this number and an endpoint.
    pub(super) fn web(number: u8) -> Self {
        Self::web_with(number, node(""), "")
    }

    /// Serves the same as [`Self::web`], with this Node and further YAML for the Service's spec.
    pub(super) fn web_with(number: u8, node: String, spec: &str) -> Self {
        let endpoints = slice("web", &[("node-a", number)], "");
        Self::serving(&[("node", node), ("web", service("web", number, spec)), ("web-1", endpoints)])
    }

    /// The option for a source with the manifests of this rig.
    pub(super) fn manifests(&self) -> String {
        format!("--source=files:{}", self.path("manifests").display())
    }

    /// Starts a program with these arguments. Its output is appended to the file `log`.
    fn start(&self, name: &str, arguments: &[&str], more: &[String], log: &str) -> Program {
        let mut command = Command::new(program(name).unwrap());
        command.args(arguments).args(more).env("NO_COLOR", "1");
        if arguments.contains(&"--proxy-mode=userspace") {
            command = before_others(&command);
        }
        Program::start(&self.namespace, command, self.path(log))
    }

    /// Starts a process that is called `name` and does nothing.
    pub(super) fn idle(&self, name: &str) -> Program {
        let link = self.path("tools").join(name);
        if !link.exists() {
            symlink("/bin/sleep", &link).unwrap();
        }
        let mut command = Command::new(link);
        command.arg("3600");
        Program::start(&self.namespace, command, self.path("idle.log"))
    }

    /// Listens on a port of all addresses of the node, as another program would.
    pub(super) fn listen(&self, port: u16) -> TcpListener {
        self.namespace.run(|| Ok(TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))?)).unwrap()
    }

    /// Kills the control plane.
    pub(super) fn stop_control_plane(&mut self) {
        self.control_plane = None;
    }

    /// Starts another control plane with these options.
    pub(super) fn control_plane(&self, options: &[&str], more: &[String]) -> Program {
        self.start("headgate-control-plane", options, more, "another-control-plane.log")
    }

    /// Creates a node, and starts an API server and a control plane that watches the API server.
    /// `Self::replica_page` reads the control plane's pages.
    pub(super) fn watching(api: fn() -> ApiServer, options: &[&str]) -> (Self, ApiServer) {
        let mut rig = Self::new();
        let api = rig.run(api);
        let source = format!("--kubeconfig={}", rig.write("kubeconfig", &api.kubeconfig()).display());
        let options = [&["--source=kubernetes", &source], &REPLICA_OPTIONS[..], options].concat();
        rig.control_plane = Some(rig.start("headgate-control-plane", &options, &[], "control-plane.log"));
        (rig, api)
    }

    /// The control plane's whole output.
    pub(super) fn control_plane_log(&self) -> String {
        fs::read_to_string(self.path("control-plane.log")).unwrap()
    }

    /// Gets a page of the control plane, and returns its status and body.
    pub(super) fn replica_page(&self, path: &str) -> Result<(u16, String), String> {
        self.get(REPLICA, path)
    }

    /// Runs `work` in the node's network namespace.
    pub(super) fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        self.namespace.run(|| Ok(work())).unwrap()
    }

    /// A path in the folder of this rig.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Replaces a manifest atomically.
    pub(super) fn put(&self, name: &str, text: &str) {
        let draft = self.path("draft");
        fs::write(&draft, text).unwrap();
        fs::rename(draft, self.path("manifests").join(format!("{name}.yaml"))).unwrap();
    }

    /// Removes a manifest.
    pub(super) fn remove(&self, name: &str) {
        fs::remove_file(self.path("manifests").join(format!("{name}.yaml"))).unwrap();
    }

    /// Writes a file and returns its path.
    pub(super) fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, text).unwrap();
        path
    }

    /// The command that runs the agent's program with only these arguments.
    fn agent_command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(program("headgate-node-agent").unwrap());
        let path = format!("{}:{}", self.path("tools").display(), std::env::var("PATH").unwrap());
        command.args(arguments).env("PATH", path).env("NO_COLOR", "1").env("RUST_BACKTRACE", "0");
        command
    }

    /// Starts the agent like [`Self::agent`], on a kernel that refuses IPv6 sockets, as after
    /// booting with `ipv6.disable=1`.
    pub(super) fn agent_without_ipv6_sockets(&self, arguments: &[&str]) -> Program {
        self.changed_agent(arguments, refuse_ipv6_sockets)
    }

    /// Starts `headgate` for node-a with these arguments.
    pub(super) fn all_in_one(&self, arguments: &[&str]) -> Program {
        let folder = format!("--runtime-dir={}", self.path("run").display());
        let mut all = vec!["--node-name=node-a", "--state-dir="];
        if !arguments.iter().any(|argument| argument.starts_with("--runtime-dir")) {
            all.push(&folder);
        }
        self.start("headgate", &[&all, arguments].concat(), &[], "headgate.log")
    }

    /// The option of headgatectl for the socket of [`Self::all_in_one`].
    pub(super) fn socket(&self) -> String {
        format!("--server=unix:{}", self.path("run/inspect.sock").display())
    }

    /// Starts a program whose standard error is a pipe that nobody reads any more.
    pub(super) fn unheard(&self, name: &str, arguments: &[&str]) -> Program {
        let mut command = Command::new(program(name).unwrap());
        command
            .args(arguments)
            .env("RUST_BACKTRACE", "0")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let mut child = self.namespace.spawn(command).unwrap();
        drop(child.stderr.take());
        Program { child, log: self.write("unheard.log", "") }
    }

    /// Runs the agent's program until it ends. The program does not use the machine's state folder.
    pub(super) fn run_agent(&self, arguments: &[&str]) -> (ExitStatus, String) {
        let arguments = [&["--state-dir="], arguments].concat();
        Program::start(&self.namespace, self.agent_command(&arguments), self.path("action.log")).ended()
    }

    /// Starts the agent of node-a with these arguments. Unless the arguments name a file, a mode or
    /// a variant, the agent uses iptables-nft.
    pub(super) fn agent(&self, arguments: &[&str]) -> Program {
        self.changed_agent(arguments, |_| {})
    }

    /// Starts the agent like [`Self::agent`], with this limit of open files.
    pub(super) fn agent_with_open_files(&self, limit: u64, arguments: &[&str]) -> Program {
        self.changed_agent(arguments, |command| {
            let mut limited = Command::new("sh");
            limited.args(["-c", &format!("ulimit -n {limit} && exec \"$0\" \"$@\"")]);
            limited.arg(command.get_program()).args(command.get_args());
            limited.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
            *command = limited;
        })
    }

    fn changed_agent(&self, arguments: &[&str], change: impl FnOnce(&mut Command)) -> Program {
        let mut all = vec!["--node-name=node-a", "--insecure-loopback", "--state-dir="];
        if !arguments.iter().any(|argument| argument.starts_with("--control-plane=")) {
            all.push("--control-plane=http://127.0.0.1:7443");
        }
        let names = |options: &[&str]| {
            arguments.iter().any(|argument| options.iter().any(|option| argument.starts_with(option)))
        };
        if !names(&["--proxy-mode=", "--config="]) {
            all.push("--proxy-mode=iptables");
        }
        if !names(&["--iptables-variant="]) {
            all.push("--iptables-variant=nft");
        }
        // A second agent finds the rules of the first, and would wait for signs of their writer.
        if !names(&["--standby="]) {
            all.push("--standby=never");
        }
        all.extend(arguments);
        let mut command = self.agent_command(&all);
        if names(&["--proxy-mode=userspace"]) {
            command = before_others(&command);
        }
        change(&mut command);
        Program::start(&self.namespace, command, self.path("agent.log"))
    }

    /// Starts the agent like [`Self::agent`], but its iptables programs lack the extension of a
    /// match, as on an incomplete installation. [`Self::give_extension`] installs the extension.
    pub(super) fn agent_without_extension(&self, extension: &str, arguments: &[&str]) -> Program {
        let folder = self.path("xtables");
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir(&folder).unwrap();
        for entry in fs::read_dir(xtables()).unwrap() {
            let entry = entry.unwrap();
            if entry.file_name().to_str() != Some(extension) {
                symlink(entry.path(), folder.join(entry.file_name())).unwrap();
            }
        }
        self.changed_agent(arguments, |command| {
            command.env("XTABLES_LIBDIR", folder);
        })
    }

    /// Installs an extension for the agent's iptables programs.
    pub(super) fn give_extension(&self, extension: &str) {
        symlink(xtables().join(extension), self.path("xtables").join(extension)).unwrap();
    }

    /// Runs `headgatectl` and returns its output.
    pub(super) fn headgatectl(&self, arguments: &[&str]) -> Result<String, String> {
        let mut command = Command::new(program("headgatectl").unwrap());
        // By default, the command prefers the socket of a program for one node, which another test
        // may run.
        command.args(arguments).env("NO_COLOR", "1").env("HEADGATE_SERVER", "http://127.0.0.1:7444");
        self.namespace.output(command).map_err(|error| format!("{error:#}"))
    }

    /// Waits until `headgatectl` prints all these texts.
    pub(super) fn until_said(&self, arguments: &[&str], texts: &[&str]) {
        eventually(&format!("{arguments:?} prints {texts:?}"), || {
            let said = self.headgatectl(arguments)?;
            if texts.iter().all(|text| said.contains(text)) { Ok(()) } else { Err(said) }
        });
    }

    /// Wraps a program. While the file `NAME.broken` exists, the wrapper fails unless its first
    /// argument is `--version`.
    pub(super) fn make_breakable(&self, name: &str) {
        use std::os::unix::fs::PermissionsExt as _;
        let found = ["/usr/sbin", "/sbin", "/usr/bin"].iter().map(|folder| Path::new(folder).join(name));
        let real = found.into_iter().find(|path| path.exists()).unwrap();
        let broken = self.path(&format!("{name}.broken"));
        let text = format!(
            "#!/bin/sh\nif [ \"$1\" != --version ] && [ -e {} ]; then echo broken on purpose >&2; exit 2; fi\nexec {} \"$@\"\n",
            broken.display(),
            real.display()
        );
        let tool = self.path("tools").join(name);
        fs::write(&tool, text).unwrap();
        fs::set_permissions(tool, fs::Permissions::from_mode(0o755)).unwrap();
    }

    pub(super) fn break_tool(&self, name: &str) {
        self.write(&format!("{name}.broken"), "");
    }

    pub(super) fn mend_tool(&self, name: &str) {
        fs::remove_file(self.path(&format!("{name}.broken"))).unwrap();
    }

    /// The addresses of the node on which NodePorts answer in mode nftables.
    pub(super) fn node_port_addresses(&self) -> Result<String, String> {
        let list = ["list", "set", "ip", "headgate", "node-port-addresses"];
        self.namespace.tool("nft", &list).map_err(|error| format!("{error:#}"))
    }

    /// The rules and chains of a table.
    pub(super) fn rules(&self, program: &str, table: &str) -> Vec<String> {
        self.tool(program, &["-t", table]).lines().map(str::to_owned).collect()
    }

    /// Runs a program on the node, and returns its output.
    pub(super) fn tool(&self, program: &str, arguments: &[&str]) -> String {
        self.namespace.tool(program, arguments).unwrap()
    }

    /// Removes every rule, as a restarting firewall does. Programs of other tests may hold the lock
    /// of iptables meanwhile.
    pub(super) fn flush(&self, program: &str) {
        for table in ["mangle", "nat", "filter"] {
            self.tool(program, &["-w", "-t", table, "-F"]);
            // Chains cannot be removed if an agent has already restored their rules.
            let _ = self.namespace.tool(program, &["-w", "-t", table, "-X"]);
        }
    }

    /// Waits until a table's IPv4 rules fulfil a condition, and returns them.
    pub(super) fn until_rules(&self, what: &str, table: &str, are_so: impl Fn(&[String]) -> bool) -> Vec<String> {
        self.until_rules_of("iptables-nft-save", what, table, are_so)
    }

    /// Waits until a rule of an IPv4 table contains this text.
    pub(super) fn until_rule(&self, table: &str, text: &str) {
        self.until_rules(text, table, |rules| rules.iter().any(|rule| rule.contains(text)));
    }

    /// Waits like [`Self::until_rules`], and reads the rules with the given save program.
    pub(super) fn until_rules_of(
        &self,
        program: &str,
        what: &str,
        table: &str,
        are_so: impl Fn(&[String]) -> bool,
    ) -> Vec<String> {
        eventually(what, || {
            let rules = self.rules(program, table);
            if are_so(&rules) { Ok(rules) } else { Err(rules.join("\n")) }
        })
    }

    /// Gets a page at any address. Returns status and body.
    pub(super) fn get_at(&self, address: &str, path: &str) -> Result<(u16, String), String> {
        let address = address.parse().unwrap();
        self.request_at("GET", address, path, "*/*").map(|(code, _, body)| (code, body))
    }

    /// Gets a page at a port of 127.0.0.1. Returns status and body.
    pub(super) fn get(&self, port: u16, path: &str) -> Result<(u16, String), String> {
        self.request("GET", port, path, "*/*").map(|(code, _, body)| (code, body))
    }

    /// Sends a request. Returns status, headers and body.
    fn request(&self, method: &str, port: u16, path: &str, accept: &str) -> Result<(u16, String, String), String> {
        self.request_at(method, SocketAddr::from(([127, 0, 0, 1], port)), path, accept)
    }

    fn request_at(
        &self,
        method: &str,
        address: SocketAddr,
        path: &str,
        accept: &str,
    ) -> Result<(u16, String, String), String> {
        let answer = self.namespace.run(|| {
            let mut stream = TcpStream::connect_timeout(&address, GUARD)?;
            stream.set_read_timeout(Some(GUARD))?;
            write!(stream, "{method} {path} HTTP/1.1\r\nHost: node\r\nAccept: {accept}\r\nConnection: close\r\n\r\n")?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer)?;
            Ok(answer)
        });
        let answer = answer.map_err(|error| format!("{error:#}"))?;
        let (head, body) = answer.split_once("\r\n\r\n").ok_or_else(|| answer.clone())?;
        let code = head.split(' ').nth(1).and_then(|code| code.parse().ok()).ok_or_else(|| answer.clone())?;
        Ok((code, head.to_owned(), body.to_owned()))
    }

    /// Gets a page of the health port. Returns status and body.
    pub(super) fn health(&self, path: &str) -> Result<(u16, serde_json::Value), String> {
        let (code, body) = self.get(HEALTH, path)?;
        Ok((code, serde_json::from_str(&body).unwrap_or_default()))
    }

    /// Waits until a page of the health port has this status, and returns its body.
    pub(super) fn until_health(&self, path: &str, code: u16) -> serde_json::Value {
        eventually(&format!("{path} answers {code}"), || match self.health(path)? {
            (found, body) if found == code => Ok(body),
            (found, body) => Err(format!("{found} {body}")),
        })
    }

    /// Waits until /healthz tells load balancers that the node is not eligible.
    pub(super) fn until_ineligible(&self) {
        eventually("the node is not eligible", || match self.health("/healthz")? {
            (503, body) if body["nodeEligible"] == false => Ok(()),
            (found, body) => Err(format!("{found} {body}")),
        });
    }

    /// Gets a page of the metrics port. Returns status and body.
    pub(super) fn page(&self, path: &str) -> Result<(u16, String), String> {
        self.get(METRICS, path)
    }

    /// Gets a page of the metrics port with this Accept header.
    pub(super) fn page_for(&self, path: &str, accept: &str) -> Result<(u16, String), String> {
        self.request("GET", METRICS, path, accept).map(|(code, _, body)| (code, body))
    }

    /// Sends DELETE to a page of the metrics port. For `/metrics/slis`, the agent resets the
    /// counts.
    pub(super) fn delete(&self, path: &str) -> Result<(u16, String), String> {
        self.request("DELETE", METRICS, path, "*/*").map(|(code, _, body)| (code, body))
    }

    /// The metrics for this Accept header: content type and text.
    pub(super) fn metrics_for(&self, accept: &str) -> (String, String) {
        let (_, head, body) = self.request("GET", METRICS, "/metrics", accept).unwrap();
        let content_type =
            head.lines().find_map(|line| line.to_lowercase().strip_prefix("content-type: ").map(str::to_owned));
        (content_type.unwrap(), body)
    }

    /// The value of a metric, or 0 if the metric is missing.
    pub(super) fn metric(&self, name: &str) -> f64 {
        page::sample(&self.page("/metrics").map(|(_, body)| body).unwrap_or_default(), name)
    }

    /// Waits until a metric's value fulfils a condition, and returns the value.
    pub(super) fn until_metric(&self, name: &str, is_so: impl Fn(f64) -> bool) -> f64 {
        eventually(name, || {
            let value = self.metric(name);
            if is_so(value) { Ok(value) } else { Err(value.to_string()) }
        })
    }

    /// Waits until the agent has programmed a version of the replica's state.
    pub(super) fn until_programmed(&self) {
        self.until_metric("headgate_agent_version_programmed", |version| version > 0.0);
    }

    /// A kernel parameter of the node.
    pub(super) fn parameter(&self, path: &str) -> String {
        let read = || Ok(fs::read_to_string(Path::new("/proc/sys").join(path))?);
        self.namespace.run(read).unwrap().trim().to_owned()
    }

    /// Sets a kernel parameter of the node.
    pub(super) fn set_parameter(&self, path: &str, value: &str) {
        self.run(|| fs::write(Path::new("/proc/sys").join(path), value)).unwrap();
    }

    /// Runs `ip` commands on the node.
    pub(super) fn ip(&self, commands: &str) {
        self.namespace.ip_batch(commands).unwrap();
    }
}

/// The folder of the extensions of iptables.
fn xtables() -> PathBuf {
    let multiarch = fs::read_dir("/usr/lib").unwrap().map(|entry| entry.unwrap().path().join("xtables"));
    let all = multiarch.chain(["/usr/lib/xtables", "/usr/lib64/xtables"].map(PathBuf::from));
    all.into_iter().find(|folder| folder.join("libxt_comment.so").exists()).unwrap()
}

/// A Node with an address of each family. `spec` is further YAML for its spec, in one line.
pub(super) fn node(spec: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Node\nmetadata: {{name: node-a}}\nspec: {{{spec}}}\nstatus:\n  addresses:\n  \
         - {{type: ExternalIP, address: 198.51.100.11}}\n  - {{type: InternalIP, address: 192.0.2.11}}\n  \
         - {{type: InternalIP, address: \"2001:db8::11\"}}\n"
    )
}

/// A Service in both families with a node port. `spec` is further YAML for its spec.
pub(super) fn service(name: &str, number: u8, spec: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{namespace: ns, name: {name}}}\nspec:\n  type: NodePort\n  \
         clusterIP: 10.96.0.{number}\n  clusterIPs: [10.96.0.{number}, \"fd00:96::{number}\"]\n  ipFamilies: [IPv4, IPv6]\n  \
         ports: [{{name: http, protocol: TCP, port: 80, targetPort: 8080, nodePort: {}}}]\n{spec}",
        30000 + u16::from(number)
    )
}

/// An EndpointSlice of the Service `name`. `endpoints` contains the node and the last byte of the
/// address of each endpoint. The addresses are in 10.244.1.0/24.
pub(super) fn slice(name: &str, endpoints: &[(&str, u8)], metadata: &str) -> String {
    let mut text = format!(
        "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata:\n  namespace: ns\n  name: {name}-1\n  \
         labels: {{kubernetes.io/service-name: {name}}}\n{metadata}addressType: IPv4\nports: [{{name: http, protocol: TCP, port: 8080}}]\nendpoints:\n"
    );
    for (node, last) in endpoints {
        text.push_str(&format!("- {{addresses: [10.244.1.{last}], nodeName: {node}}}\n"));
    }
    text
}

/// A Service like [`service`], but only with IPv4.
pub(super) fn service_v4(name: &str, number: u8, spec: &str) -> String {
    let both = format!("  clusterIPs: [10.96.0.{number}, \"fd00:96::{number}\"]\n  ipFamilies: [IPv4, IPv6]\n");
    let v4 = service(name, number, spec).replace(&both, "");
    assert!(!v4.contains("fd00"), "{v4}");
    v4
}
