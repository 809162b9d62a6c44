//! All tests against real servers, in one binary so that they share one server of each kind.

#![allow(clippy::unwrap_used)]

mod claim;
mod enqueue;
mod lifecycle;
mod migration;
mod relay;
mod support;
mod versioned;

use libtest_mimic::Arguments;

fn main() {
    let arguments = Arguments::from_args();
    let tests = [
        migration::tests(),
        enqueue::tests(),
        claim::tests(),
        lifecycle::tests(),
        relay::tests(),
        versioned::tests(),
    ]
    .into_iter()
    .flatten()
    .collect();
    let conclusion = libtest_mimic::run(&arguments, tests);
    support::servers::stop();
    conclusion.exit();
}
