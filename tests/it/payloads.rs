//! Large, odd and refused values.
use libtest_mimic::Trial;
pub(crate) fn tests() -> Vec<Trial> {
    Vec::new()
}
