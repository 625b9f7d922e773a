//! The client's side of one TLS connection. The caller provides the buffers, so that all
//! connections can share them.

use std::sync::Arc;

use rustls::{
    ClientConfig, HandshakeKind,
    client::UnbufferedClientConnection,
    unbuffered::{ConnectionState, EncodeError, EncryptError, UnbufferedStatus},
};

use super::certificates::Authority;

/// One connection.
pub(super) struct Tls {
    connection: UnbufferedClientConnection,
    /// The received part of an incomplete record.
    partial: Vec<u8>,
    is_open: bool,
    pub(super) is_closed: bool,
}

/// The result of processing received bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Progress {
    /// Whether the handshake has ended with these bytes.
    pub(super) has_opened: bool,
}

impl Tls {
    pub(super) fn new(config: Arc<ClientConfig>) -> anyhow::Result<Self> {
        let connection = UnbufferedClientConnection::new(config, Authority::server_name()?)?;
        Ok(Self { connection, partial: Vec::new(), is_open: false, is_closed: false })
    }

    /// The received part of an incomplete record. The caller must put this part in front of the
    /// next bytes.
    pub(super) fn partial(&self) -> &[u8] {
        &self.partial
    }

    /// Whether the handshake resumed a session; `None` before the end of the handshake.
    pub(super) fn is_resumed(&self) -> Option<bool> {
        self.connection.handshake_kind().map(|kind| kind == HandshakeKind::Resumed)
    }

    /// Processes `incoming`, which must begin with [`Self::partial`]. Calls `on_data` with
    /// decrypted bytes, and appends messages of the TLS protocol to `out`.
    pub(super) fn take(
        &mut self,
        incoming: &mut [u8],
        out: &mut Vec<u8>,
        mut on_data: impl FnMut(&[u8]) -> Result<(), String>,
    ) -> Result<Progress, String> {
        let mut used = 0;
        let was_open = self.is_open;
        loop {
            let UnbufferedStatus { discard, state } = self.connection.process_tls_records(&mut incoming[used..]);
            used += discard;
            match state.map_err(|error| format!("TLS: {error}"))? {
                ConnectionState::ReadTraffic(mut traffic) => {
                    while let Some(record) = traffic.next_record() {
                        on_data(record.map_err(|error| format!("TLS: {error}"))?.payload)?;
                    }
                }
                ConnectionState::EncodeTlsData(mut data) => grow(out, |room| match data.encode(room) {
                    Ok(count) => Ok(count),
                    Err(EncodeError::InsufficientSize(size)) => Err(Some(size.required_size)),
                    Err(EncodeError::AlreadyEncoded) => Err(None),
                })?,
                ConnectionState::TransmitTlsData(data) => data.done(),
                ConnectionState::WriteTraffic(_) => {
                    self.is_open = true;
                    break;
                }
                ConnectionState::BlockedHandshake => break,
                ConnectionState::PeerClosed | ConnectionState::Closed => {
                    self.is_closed = true;
                    break;
                }
                other => return Err(format!("TLS: unexpected state {other:?}")),
            }
        }
        self.partial.clear();
        self.partial.extend_from_slice(&incoming[used..]);
        if self.partial.is_empty() {
            self.partial.shrink_to(0);
        }
        Ok(Progress { has_opened: self.is_open && !was_open })
    }

    /// Encrypts `plain` and appends the result to `out`. The handshake must have ended.
    pub(super) fn encrypt(&mut self, plain: &[u8], out: &mut Vec<u8>) -> Result<(), String> {
        let UnbufferedStatus { state, .. } = self.connection.process_tls_records(&mut []);
        match state.map_err(|error| format!("TLS: {error}"))? {
            ConnectionState::WriteTraffic(mut traffic) => grow(out, |room| match traffic.encrypt(plain, room) {
                Ok(count) => Ok(count),
                Err(EncryptError::InsufficientSize(size)) => Err(Some(size.required_size)),
                Err(EncryptError::EncryptExhausted) => Err(None),
            }),
            other => Err(format!("TLS: cannot write in the state {other:?}")),
        }
    }
}

/// Calls `write` with free space after the end of `out`. If `write` fails and returns the space
/// that it needs, `grow` calls `write` again with more space.
fn grow(out: &mut Vec<u8>, mut write: impl FnMut(&mut [u8]) -> Result<usize, Option<usize>>) -> Result<(), String> {
    let start = out.len();
    let mut room = 512;
    loop {
        out.resize(start + room, 0);
        match write(&mut out[start..]) {
            Ok(count) => {
                out.truncate(start + count);
                return Ok(());
            }
            Err(Some(required)) if required > room => room = required,
            Err(_) => {
                out.truncate(start);
                return Err("TLS: the connection cannot encode more records".to_owned());
            }
        }
    }
}
