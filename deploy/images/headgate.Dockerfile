# docker build -f deploy/images/headgate.Dockerfile -t headgate/headgate:0.1.0 .
# docker run --network host --privileged headgate/headgate:0.1.0 --source kubernetes --help
FROM rust:1.95-slim-bookworm AS build
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN cargo build --release --locked -p headgate -p headgatectl

FROM debian:bookworm-slim
# The package iptables contains both variants, for IPv4 and IPv6. The agent uses the variant that
# the node uses.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends iptables kmod \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build /src/target/release/headgate /src/target/release/headgatectl /usr/local/bin/
COPY LICENSE /usr/share/doc/headgate/LICENSE
ENTRYPOINT ["/usr/local/bin/headgate"]
