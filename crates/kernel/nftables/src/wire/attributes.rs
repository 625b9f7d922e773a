//! Numbers of message types and attributes.

/// `NFT_MSG_…`
pub(crate) mod message {
    pub(crate) const NEW_TABLE: u8 = 0;
    pub(crate) const GET_TABLE: u8 = 1;
    pub(crate) const DELETE_TABLE: u8 = 2;
    pub(crate) const NEW_CHAIN: u8 = 3;
    pub(crate) const GET_CHAIN: u8 = 4;
    pub(crate) const DELETE_CHAIN: u8 = 5;
    pub(crate) const NEW_RULE: u8 = 6;
    pub(crate) const GET_RULE: u8 = 7;
    pub(crate) const DELETE_RULE: u8 = 8;
    pub(crate) const NEW_SET: u8 = 9;
    pub(crate) const GET_SET: u8 = 10;
    pub(crate) const DELETE_SET: u8 = 11;
    pub(crate) const NEW_ELEMENTS: u8 = 12;
    pub(crate) const GET_ELEMENTS: u8 = 13;
    pub(crate) const DELETE_ELEMENTS: u8 = 14;
    pub(crate) const NEW_GENERATION: u8 = 15;
    pub(crate) const GET_GENERATION: u8 = 16;
}

/// `NFTA_TABLE_…`
pub(super) mod table {
    pub(crate) const NAME: u16 = 1;
    pub(crate) const FLAGS: u16 = 2;
    pub(crate) const HANDLE: u16 = 4;
    pub(crate) const USER_DATA: u16 = 6;
    pub(crate) const OWNER: u16 = 7;

    /// `NFT_TABLE_F_DORMANT`
    pub(crate) const DORMANT: u32 = 1;
    /// `NFT_TABLE_F_OWNER`
    pub(crate) const OWNED: u32 = 2;
    /// `NFT_TABLE_F_PERSIST`
    pub(crate) const PERSISTENT: u32 = 4;
}

/// `NFTA_CHAIN_…` and `NFTA_HOOK_…`
pub(super) mod chain {
    pub(crate) const TABLE: u16 = 1;
    pub(crate) const HANDLE: u16 = 2;
    pub(crate) const NAME: u16 = 3;
    pub(crate) const HOOK: u16 = 4;
    pub(crate) const POLICY: u16 = 5;
    pub(crate) const TYPE: u16 = 7;
    pub(crate) const USER_DATA: u16 = 12;
    pub(crate) const HOOK_NUMBER: u16 = 1;
    pub(crate) const HOOK_PRIORITY: u16 = 2;
}

/// `NFTA_RULE_…`
pub(super) mod rule {
    pub(crate) const TABLE: u16 = 1;
    pub(crate) const CHAIN: u16 = 2;
    pub(crate) const HANDLE: u16 = 3;
    pub(crate) const EXPRESSIONS: u16 = 4;
    pub(crate) const USER_DATA: u16 = 7;
}

/// `NFTA_SET_…`, `NFTA_SET_DESC_…` and `NFT_SET_…`
pub(super) mod set {
    pub(crate) const TABLE: u16 = 1;
    pub(crate) const NAME: u16 = 2;
    pub(crate) const FLAGS: u16 = 3;
    pub(crate) const KEY_TYPE: u16 = 4;
    pub(crate) const KEY_LENGTH: u16 = 5;
    pub(crate) const DATA_TYPE: u16 = 6;
    pub(crate) const DATA_LENGTH: u16 = 7;
    pub(crate) const DESCRIPTION: u16 = 9;
    pub(crate) const ID: u16 = 10;
    pub(crate) const TIMEOUT: u16 = 11;
    pub(crate) const GC_INTERVAL: u16 = 12;
    pub(crate) const USER_DATA: u16 = 13;
    pub(crate) const HANDLE: u16 = 16;
    pub(crate) const EXPRESSION: u16 = 17;
    pub(crate) const EXPRESSIONS: u16 = 18;
    pub(crate) const COUNT: u16 = 20;

    pub(crate) const DESCRIPTION_SIZE: u16 = 1;
    pub(crate) const DESCRIPTION_CONCATENATION: u16 = 2;
    pub(crate) const FIELD_LENGTH: u16 = 1;

    pub(crate) const ANONYMOUS: u32 = 0x1;
    pub(crate) const CONSTANT: u32 = 0x2;
    pub(crate) const INTERVAL: u32 = 0x4;
    pub(crate) const MAP: u32 = 0x8;
    pub(crate) const HAS_TIMEOUT: u32 = 0x10;
    pub(crate) const DYNAMIC: u32 = 0x20;
    pub(crate) const CONCATENATION: u32 = 0x80;

    /// `NFT_DATA_VERDICT`
    pub(crate) const VERDICTS: u32 = 0xffff_ff00;
}

/// `NFTA_SET_ELEM_LIST_…` and `NFTA_SET_ELEM_…`
pub(super) mod element {
    pub(crate) const LIST_TABLE: u16 = 1;
    pub(crate) const LIST_SET: u16 = 2;
    pub(crate) const LIST_ELEMENTS: u16 = 3;

    pub(crate) const KEY: u16 = 1;
    pub(crate) const DATA: u16 = 2;
    pub(crate) const FLAGS: u16 = 3;
    pub(crate) const TIMEOUT: u16 = 4;
    pub(crate) const EXPIRATION: u16 = 5;
    pub(crate) const USER_DATA: u16 = 6;
    pub(crate) const EXPRESSION: u16 = 7;
    pub(crate) const KEY_END: u16 = 10;
    pub(crate) const EXPRESSIONS: u16 = 11;

    pub(crate) const INTERVAL_END: u32 = 1;
    pub(crate) const CATCH_ALL: u32 = 2;
}

/// `NFTA_GEN_…`
pub(super) mod generation {
    pub(crate) const ID: u16 = 1;
    pub(crate) const PROCESS_ID: u16 = 2;
    pub(crate) const PROCESS_NAME: u16 = 3;
}

/// `NFTA_LIST_ELEM`
pub(super) const LIST_ELEMENT: u16 = 1;
/// `NFTA_EXPR_NAME`
pub(super) const EXPRESSION_NAME: u16 = 1;
/// `NFTA_EXPR_DATA`
pub(super) const EXPRESSION_DATA: u16 = 2;
/// `NFTA_DATA_VALUE`
pub(super) const DATA_VALUE: u16 = 1;
/// `NFTA_DATA_VERDICT`
pub(super) const DATA_VERDICT: u16 = 2;
/// `NFTA_VERDICT_CODE`
pub(super) const VERDICT_CODE: u16 = 1;
/// `NFTA_VERDICT_CHAIN`
pub(super) const VERDICT_CHAIN: u16 = 2;
