//! ServiceCIDRs: the ranges of ClusterIPs.

use headgate_core::ServiceCidr;

use super::parse::{self, Findings, Reading};
use crate::objects;

pub(super) fn read(object: &objects::ServiceCidr) -> Reading<ServiceCidr> {
    let mut findings = Findings::default();
    if findings.checked("metadata.name", parse::subdomain(&object.metadata.name)).is_none() {
        return Reading { value: None, findings };
    }
    let listed = object.spec.cidrs.len();
    if listed > parse::MAX_LISTED {
        findings.object("spec.cidrs", format!("{listed} ranges are too many: give at most {}", parse::MAX_LISTED));
        return Reading { value: None, findings };
    }
    let texts = object.spec.cidrs.iter().enumerate();
    let range =
        |(index, text): (usize, &String)| findings.checked(format_args!("spec.cidrs[{index}]"), parse::range(text));
    let cidrs: Vec<_> = texts.filter_map(range).collect();
    if object.spec.cidrs.is_empty() {
        findings.object("spec.cidrs", "a ServiceCIDR needs a range: give a range such as 10.96.0.0/12");
    }
    let value = (!cidrs.is_empty()).then(|| ServiceCidr { name: object.metadata.name.as_str().into(), cidrs });
    Reading { value, findings }
}
