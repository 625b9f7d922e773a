# docker build -f deploy/images/control-plane.Dockerfile -t headgate/control-plane:0.1.0 .
FROM rust:1.95-slim-bookworm AS build
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN cargo build --release --locked -p headgate-control-plane -p headgatectl

FROM debian:bookworm-slim
COPY --from=build /src/target/release/headgate-control-plane /src/target/release/headgatectl /usr/local/bin/
COPY LICENSE /usr/share/doc/headgate/LICENSE
USER 65532:65532
EXPOSE 7443 7444 7445 7480
ENTRYPOINT ["/usr/local/bin/headgate-control-plane"]
