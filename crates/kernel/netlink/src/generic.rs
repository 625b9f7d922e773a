//! Generic netlink (`linux/genetlink.h`). Clients look up families by name, and requests begin with
//! `struct genlmsghdr`.

use super::{Connection, Malformed, NetlinkError, Request, find, read_u16};

/// `GENL_ID_CTRL`: the family that looks up other families.
const CONTROLLER: u16 = 0x10;
const CONTROLLER_VERSION: u8 = 2;
/// `CTRL_CMD_GETFAMILY`.
const GET_FAMILY: u8 = 3;
/// `CTRL_ATTR_FAMILY_ID`.
const FAMILY_ID: u16 = 1;
/// `CTRL_ATTR_FAMILY_NAME`.
const FAMILY_NAME: u16 = 2;
/// Bytes of `struct genlmsghdr`.
const HEADER_BYTES: usize = 4;

/// A generic netlink family: its number in this kernel and the version that requests use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Family {
    /// The message type of the family.
    pub id: u16,
    /// The version in the header of requests.
    pub version: u8,
}

impl Family {
    /// Looks up a family by name on a connection of [`libc::NETLINK_GENERIC`]. The kernel loads the
    /// family's module if the module is available.
    ///
    /// # Errors
    /// [`NetlinkError::Kernel`] with `ENOENT` if the family does not exist and no module provides
    /// it.
    pub fn find(connection: &mut Connection, name: &str, version: u8) -> Result<Self, NetlinkError> {
        let request = Request::new(CONTROLLER, 0, &[GET_FAMILY, CONTROLLER_VERSION, 0, 0]).text(FAMILY_NAME, name);
        Ok(Self { id: connection.ask_one::<_, NetlinkError>(request, family_id)?, version })
    }

    /// Begins a request to the family, with flags in addition to `NLM_F_REQUEST`.
    #[must_use]
    pub fn request(self, command: u8, flags: u16) -> Request {
        Request::new(self.id, flags, &[command, self.version, 0, 0])
    }
}

/// Splits the payload of a message into the command and the attributes.
///
/// # Errors
/// The payload is truncated.
pub fn split(payload: &[u8]) -> Result<(u8, &[u8]), Malformed> {
    let short = Malformed("a generic netlink message is shorter than its header");
    let command = *payload.first().ok_or(short)?;
    Ok((command, payload.get(HEADER_BYTES..).ok_or(short)?))
}

fn family_id(payload: &[u8]) -> Result<u16, Malformed> {
    read_u16(find(split(payload)?.1, FAMILY_ID, "a family without a number")?)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_generic_netlink_controller_is_found() {
        let mut connection = Connection::open(libc::NETLINK_GENERIC).unwrap();
        assert_eq!(Family::find(&mut connection, "nlctrl", 1).unwrap().id, CONTROLLER);
        let error = Family::find(&mut connection, "no-such-family", 1).unwrap_err();
        assert_eq!(error.refusal_code(), Some(libc::ENOENT), "{error}");
    }

    #[test]
    fn an_answer_without_the_familys_number_is_an_error() {
        assert!(family_id(&[1, 2]).is_err());
        assert!(family_id(&[1, 2, 0, 0]).is_err());
        assert!(family_id(&[1, 2, 0, 0, 9, 0, 1, 0]).is_err());
        assert_eq!(family_id(&[1, 2, 0, 0, 6, 0, 1, 0, 0x1a, 0, 0, 0]), Ok(u16::from_ne_bytes([0x1a, 0])));
    }
}
