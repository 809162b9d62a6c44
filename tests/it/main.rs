//! All tests against real servers, in one binary so that they share one server of each kind.

#![allow(clippy::unwrap_used)]

mod support;

use libtest_mimic::Arguments;

fn main() {
    let arguments = Arguments::from_args();
    let tests = Vec::new();
    let conclusion = libtest_mimic::run(&arguments, tests);
    support::servers::stop();
    conclusion.exit();
}
