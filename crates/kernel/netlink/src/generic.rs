//! Generic netlink (`linux/genetlink.h`). Clients look up families by name, and messages begin with
//! `struct genlmsghdr`: the command, the version of the family, and two unused bytes.

use super::{Connection, Fields, Malformed, NetlinkError, Request, read_u16};

const CONTROLLER: u16 = libc::GENL_ID_CTRL as u16;
const CONTROLLER_VERSION: u8 = 2;

/// Looks up the message type of a family by the name of the family, on a connection of
/// [`libc::NETLINK_GENERIC`]. The kernel loads the family's module if the module is available.
/// Errors: [`NetlinkError::Kernel`] with `ENOENT` if the family does not exist and no module
/// provides it.
pub fn find(connection: &mut Connection, name: &str) -> Result<u16, NetlinkError> {
    let header = [libc::CTRL_CMD_GETFAMILY as u8, CONTROLLER_VERSION, 0, 0];
    connection.ask_one(&Request::new(CONTROLLER, 0, &header).text(libc::CTRL_ATTR_FAMILY_NAME as u16, name), number)
}

/// The attributes of a message payload. Errors: the payload is truncated.
pub fn fields(payload: &[u8]) -> Result<Fields<'_>, Malformed> {
    Fields::of(payload.get(4..).ok_or(Malformed("a generic netlink message is shorter than its header"))?)
}

fn number(payload: &[u8]) -> Result<u16, Malformed> {
    fields(payload)?.need(libc::CTRL_ATTR_FAMILY_ID as u16, read_u16, "a family without a number")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_without_the_familys_number_is_an_error() {
        assert!(number(&[1, 2]).is_err());
        assert!(number(&[1, 2, 0, 0]).is_err());
        assert!(number(&[1, 2, 0, 0, 9, 0, 1, 0]).is_err());
        assert_eq!(number(&[1, 2, 0, 0, 6, 0, 1, 0, 0x1a, 0, 0, 0]), Ok(u16::from_ne_bytes([0x1a, 0])));
    }
}
