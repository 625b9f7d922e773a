//! Texts of errors with their causes.

use std::error::Error;

/// Returns the text of an error followed by the texts of its causes. A cause whose text is already
/// included is left out.
#[must_use]
pub fn chain(error: &(dyn Error + 'static)) -> String {
    let causes = std::iter::successors(error.source(), |cause| (*cause).source()).map(ToString::to_string);
    causes.fold(error.to_string(), |text, cause| if text.contains(&cause) { text } else { format!("{text}: {cause}") })
}
