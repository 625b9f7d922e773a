//! Texts of errors with their causes.

use std::error::Error;

/// Returns the text of an error followed by the texts of its causes. A cause whose text is already
/// included is left out.
#[must_use]
pub fn chain(error: &(dyn Error + 'static)) -> String {
    let causes = std::iter::successors(error.source(), |cause| (*cause).source()).map(ToString::to_string);
    causes.fold(error.to_string(), |text, cause| if text.contains(&cause) { text } else { format!("{text}: {cause}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Layer(&'static str, Option<Box<Self>>);

    impl std::fmt::Display for Layer {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str(self.0)
        }
    }

    impl Error for Layer {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            self.1.as_ref().map(|cause| &**cause as _)
        }
    }

    #[test]
    fn causes_follow_the_error_and_repetitions_are_left_out() {
        let cause = Layer("no route", Some(Box::new(Layer("route", None))));
        assert_eq!(chain(&Layer("cannot connect", Some(Box::new(cause)))), "cannot connect: no route");
        assert_eq!(chain(&Layer("alone", None)), "alone");
    }
}
