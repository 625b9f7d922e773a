# docker build -f deploy/images/drain.Dockerfile -t headgate/drain:0.1.0 .
FROM rust:1.95-slim-bookworm AS build
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
# A static program runs in the image of every pod.
RUN RUSTFLAGS="-C target-feature=+crt-static" cargo build --release --locked -p headgate-drain

FROM scratch
COPY --from=build /src/target/release/headgate-drain /headgate-drain
ENTRYPOINT ["/headgate-drain"]
