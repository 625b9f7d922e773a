//! The clients of kernel interfaces, against a kernel and the programs that everybody uses: IPVS and links inside User-Mode Linux, IP sets in
//! namespaces of the host.
#![allow(missing_docs, clippy::unwrap_used)]

mod kernel_clients {
    mod ipset;
    mod ipvs;
    mod links;
    mod nftables;

    use std::{
        net::{SocketAddr, TcpStream},
        process::Command,
        time::Duration,
    };

    /// Connects, once that is possible: the kernel adds the route to a new IPv6 address a moment after the address.
    fn connect_soon(address: SocketAddr) -> TcpStream {
        for _ in 0..500 {
            if let Ok(stream) = TcpStream::connect(address) {
                return stream;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        TcpStream::connect(address).unwrap()
    }

    /// What a program prints; it has to succeed.
    fn output(program: &str, arguments: &[&str]) -> String {
        let output = Command::new(program).args(arguments).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{program} {arguments:?}: {errors}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// The lines of a text without blanks at their ends, sorted.
    fn sorted_lines(text: &str) -> Vec<&str> {
        let mut lines: Vec<_> = text.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
        lines.sort_unstable();
        lines
    }
}
