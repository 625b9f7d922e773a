//! Content hashes and bucket digests. With about 20 KiB of digests, two sides find the buckets in
//! which their states differ.
//!
//! The content hash of a resource is the first 128 bits of SHA-256 over its key and value in a
//! canonical form (`Form`), so every replica and every agent computes equal hashes. The digest of a
//! bucket is the sum of the hashes of its resources modulo 2^128, and their count. The digest does
//! not depend on the order of resources, and a change costs one subtraction and one addition.

use std::net::IpAddr;

use sha2::{Digest as _, Sha256};

use crate::model::{Conditions, Endpoint, EndpointPort, Placement, Service, ServiceCidr, ServiceKey, Weight};

/// Number of buckets. The hash of a key selects the bucket.
pub const BUCKETS: usize = 1024;

/// The digest of one bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BucketDigest {
    /// Sum of content hashes modulo 2^128.
    pub sum: u128,
    /// Number of resources.
    pub count: u32,
}

impl BucketDigest {
    /// Adds a resource.
    pub fn add(&mut self, hash: u128) {
        self.sum = self.sum.wrapping_add(hash);
        self.count = self.count.wrapping_add(1);
    }
}

/// Digests of all buckets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Digests {
    buckets: Box<[BucketDigest]>,
}

impl Default for Digests {
    fn default() -> Self {
        Self { buckets: vec![BucketDigest::default(); BUCKETS].into_boxed_slice() }
    }
}

impl Digests {
    /// Creates digests from the buckets that a peer sent. Returns `None` if their number is not
    /// [`BUCKETS`].
    #[must_use]
    pub fn from_buckets(buckets: Vec<BucketDigest>) -> Option<Self> {
        (buckets.len() == BUCKETS).then(|| Self { buckets: buckets.into_boxed_slice() })
    }

    /// Returns all digests in bucket order.
    #[must_use]
    pub fn buckets(&self) -> &[BucketDigest] {
        &self.buckets
    }

    /// Returns the digest of one bucket.
    #[must_use]
    pub fn bucket(&self, bucket: u16) -> BucketDigest {
        self.buckets[usize::from(bucket) % BUCKETS]
    }

    /// Adds a resource.
    pub fn add(&mut self, bucket: u16, hash: u128) {
        self.buckets[usize::from(bucket) % BUCKETS].add(hash);
    }

    /// Removes a resource that was added with this hash.
    pub fn subtract(&mut self, bucket: u16, hash: u128) {
        let digest = &mut self.buckets[usize::from(bucket) % BUCKETS];
        digest.sum = digest.sum.wrapping_sub(hash);
        digest.count = digest.count.wrapping_sub(1);
    }

    /// Number of resources in all buckets.
    #[must_use]
    pub fn resource_count(&self) -> u64 {
        self.buckets.iter().map(|digest| u64::from(digest.count)).sum()
    }

    /// Returns the buckets in which `self` and `other` differ, in ascending order.
    #[must_use]
    pub fn differing(&self, other: &Self) -> Vec<u16> {
        let pairs = self.buckets.iter().zip(other.buckets.iter()).enumerate();
        pairs.filter(|(_, (a, b))| a != b).filter_map(|(bucket, _)| u16::try_from(bucket).ok()).collect()
    }
}

/// Returns the bucket of a service and of all its endpoints.
#[must_use]
pub fn service_bucket(key: &ServiceKey) -> u16 {
    let mut form = Form::new(b'k');
    form.key(key);
    bucket(form.finish())
}

/// Returns the bucket of a ServiceCIDR.
#[must_use]
pub fn service_cidr_bucket(name: &str) -> u16 {
    let mut form = Form::new(b'c');
    form.text(name);
    bucket(form.finish())
}

fn bucket(hash: u128) -> u16 {
    // The conversion cannot fail: the remainder is below 1,024.
    u16::try_from(hash % BUCKETS as u128).unwrap_or_default()
}

/// Returns the content hash of a Service.
#[must_use]
pub fn service_hash(service: &Service) -> u128 {
    let mut form = Form::new(b'S');
    form.key(&service.key);
    for list in [&service.cluster_ips, &service.external_ips, &service.load_balancer_ips] {
        form.number(list.len() as u64);
        list.iter().for_each(|address| form.address(*address));
    }
    form.number(service.ports.len() as u64);
    for port in &service.ports {
        form.text(&port.name);
        form.text(port.protocol.as_lower_str());
        form.number(u64::from(port.port));
        form.number(u64::from(port.node_port));
    }
    form.number(u64::from(service.internal_traffic_policy.is_local()));
    form.number(u64::from(service.external_traffic_policy.is_local()));
    form.number(service.session_affinity.map_or(0, |affinity| u64::from(affinity.timeout_seconds)));
    form.number(service.load_balancer_source_ranges.len() as u64);
    for range in &service.load_balancer_source_ranges {
        form.address(range.addr());
        form.number(u64::from(range.prefix_len()));
    }
    form.number(u64::from(service.health_check_node_port));
    form.number(service.created_unix_seconds.cast_unsigned());
    form.text(&service.scheduler);
    form.text(&service.health_check);
    form.number(u64::from(service.health_check_interval_ms));
    if !service.load_balancing.is_empty() {
        form.text(&service.load_balancing);
    }
    // The names keep these fields apart from each other and from the field before.
    if let Some(version) = service.proxy_protocol {
        form.text("proxy-protocol");
        form.text(version.as_str());
    }
    if service.max_connections != 0 {
        form.text("max-connections");
        form.number(u64::from(service.max_connections));
    }
    form.finish()
}

/// Returns the content hash of an endpoint of a service.
#[must_use]
pub fn endpoint_hash(key: &ServiceKey, endpoint: &Endpoint) -> u128 {
    let mut form = Form::new(b'E');
    form.key(key);
    form.address(endpoint.address);
    form.ports(&endpoint.ports);
    form.conditions(endpoint.conditions);
    form.placement(&endpoint.placement);
    form.finish()
}

/// Returns the content hash of a ServiceCIDR.
#[must_use]
pub fn service_cidr_hash(service_cidr: &ServiceCidr) -> u128 {
    let mut form = Form::new(b'C');
    form.text(&service_cidr.name);
    for cidr in &service_cidr.cidrs {
        form.address(cidr.addr());
        form.number(u64::from(cidr.prefix_len()));
    }
    form.finish()
}

/// The canonical form of a value. It begins with a tag. A number is 8 bytes, little endian. A text
/// is its length as a number, then its bytes. An address is its length in one byte, then its bytes.
pub(crate) struct Form(Sha256);

impl Form {
    pub(crate) fn new(tag: u8) -> Self {
        Self(Sha256::new_with_prefix([tag]))
    }

    pub(crate) fn number(&mut self, number: u64) {
        self.0.update(number.to_le_bytes());
    }

    pub(crate) fn text(&mut self, text: &str) {
        self.number(text.len() as u64);
        self.0.update(text.as_bytes());
    }

    pub(crate) fn address(&mut self, address: IpAddr) {
        match address {
            IpAddr::V4(v4) => {
                self.0.update([4]);
                self.0.update(v4.octets());
            }
            IpAddr::V6(v6) => {
                self.0.update([16]);
                self.0.update(v6.octets());
            }
        }
    }

    pub(crate) fn key(&mut self, key: &ServiceKey) {
        self.text(&key.namespace);
        self.text(&key.name);
    }

    /// Adds a list of ports. Bits 16 and 17 of the port number are set if the port carries
    /// conditions and a placement, respectively.
    pub(crate) fn ports(&mut self, ports: &[EndpointPort]) {
        self.number(ports.len() as u64);
        for port in ports {
            self.text(&port.name);
            self.text(port.protocol.as_lower_str());
            let carries = u64::from(port.conditions.is_some()) | u64::from(port.placement.is_some()) << 1;
            self.number(u64::from(port.port) | carries << 16);
            if let Some(conditions) = port.conditions {
                self.conditions(conditions);
            }
            if let Some(placement) = &port.placement {
                self.number(u64::from(placement.hints.is_some()));
                self.placement(placement);
            }
        }
    }

    fn conditions(&mut self, conditions: Conditions) {
        let Conditions { ready, serving, terminating } = conditions;
        self.number(u64::from(ready) | u64::from(serving) << 1 | u64::from(terminating) << 2);
    }

    /// Adds a placement. The form of a placement does not show whether the placement has hints. So
    /// a placement must be the last value, or the caller must first add a number that depends on
    /// whether the placement has hints.
    pub(crate) fn placement(&mut self, placement: &Placement) {
        let Placement { node, zone, hints, weight } = placement;
        if *weight != Weight::default() {
            // No text has this length, so a weight cannot be confused with the name of a node.
            self.number(u64::MAX);
            self.number(weight.hundredths().into());
        }
        self.text(node.as_deref().unwrap_or_default());
        self.text(zone.as_deref().unwrap_or_default());
        for list in hints.iter().flat_map(|hints| [&hints.zones, &hints.nodes]) {
            self.number(list.len() as u64);
            list.iter().for_each(|name| self.text(name));
        }
    }

    pub(crate) fn finish(self) -> u128 {
        let hash = self.0.finalize();
        let mut first = [0; 16];
        first.copy_from_slice(&hash[..16]);
        u128::from_le_bytes(first)
    }
}
