//! All tests against real servers, in one binary so that they share one server of each kind.
//!
//! The same binary plays the relay processes that some tests kill and freeze.

#![allow(clippy::unwrap_used)]

mod claim;
mod cluster;
mod crash;
mod embedded;
mod enqueue;
mod health;
mod lifecycle;
mod memory;
mod migration;
mod nats;
mod ordering;
mod outage;
mod own_table;
mod payloads;
mod plans;
mod pooler;
mod relay;
mod sqlite;
mod support;
mod time;
mod versioned;
mod wake;

use libtest_mimic::Arguments;

fn main() {
    if support::process::play_role() {
        return;
    }
    let arguments = Arguments::from_args();
    let tests = [
        migration::tests(),
        enqueue::tests(),
        claim::tests(),
        lifecycle::tests(),
        relay::tests(),
        health::tests(),
        embedded::tests(),
        memory::tests(),
        nats::tests(),
        ordering::tests(),
        cluster::tests(),
        outage::tests(),
        own_table::tests(),
        crash::tests(),
        sqlite::tests(),
        versioned::tests(),
        wake::tests(),
        pooler::tests(),
        plans::tests(),
        time::tests(),
        payloads::tests(),
    ];
    let conclusion = libtest_mimic::run(&arguments, tests.into_iter().flatten().collect());
    support::servers::stop();
    conclusion.exit();
}
