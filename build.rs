//! Links programs of the debug profile at fixed addresses. Otherwise the dynamic linker adapts more
//! than 100,000 addresses at each start. A test run starts thousands of programs, and this takes
//! 0.1 s of processor time for each program in User-Mode Linux.

fn main() {
    println!("cargo::rerun-if-env-changed=PROFILE");
    let is_linux = std::env::var("CARGO_CFG_TARGET_OS").is_ok_and(|system| system == "linux");
    if is_linux && std::env::var("PROFILE").is_ok_and(|profile| profile == "debug") {
        println!("cargo::rustc-link-arg=-no-pie");
    }
}
