//! Relays in processes of their own, to be killed and frozen.
//!
//! The test binary runs itself again with a role in its environment.

use std::{
    env,
    process::{Command, ExitStatus, Stdio},
    time::Duration,
};

use sea_orm_outbox::{Ack, Message, NatsPublisher, PublishError, Publisher, Relay, lifecycle::RetryPolicy};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, BufReader, Lines},
    process::{Child, ChildStdout},
    time::sleep,
};

use super::{TestDatabase, database, nats::TestStream, within};

const ROLE: &str = "OUTBOX_TEST_ROLE";
const DATABASE: &str = "OUTBOX_TEST_DATABASE";
const NATS: &str = "OUTBOX_TEST_NATS";
const RELAYS: &str = "OUTBOX_TEST_RELAYS";
const LEASE_MS: &str = "OUTBOX_TEST_LEASE_MS";

/// A lease that a test can wait out after a kill.
pub(crate) const SHORT_LEASE: Duration = Duration::from_millis(1_500);

/// A lease that no working relay lets end, however busy the machine is.
pub(crate) const LONG_LEASE: Duration = Duration::from_secs(60);

/// What the publisher of a process does besides publishing. Each says on standard output what it is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Behaviour {
    /// Nothing.
    Publish,
    /// Says `holding` and goes no further: claimed, and not published.
    HoldBeforePublish,
    /// Publishes, says `acknowledged` and goes no further: published, and not settled.
    HoldAfterAck,
    /// Says `holding`, waits for a moment, and publishes.
    Hesitate,
    /// Aborts the process when it is given the payload `killer`.
    DieOfKiller,
}

const ALL: [Behaviour; 5] = [
    Behaviour::Publish,
    Behaviour::HoldBeforePublish,
    Behaviour::HoldAfterAck,
    Behaviour::Hesitate,
    Behaviour::DieOfKiller,
];

/// Whether this process has a role to play instead of running tests; then it has played it.
pub(crate) fn play_role() -> bool {
    let Ok(role) = env::var(ROLE) else { return false };
    let behaviour = ALL.into_iter().find(|b| format!("{b:?}") == role).expect("the role is known");
    let number = |name| env::var(name).expect("the number is set").parse().expect("the number is one");
    let lease = Duration::from_millis(number(LEASE_MS));
    tracing_subscriber::fmt().with_max_level(tracing::Level::WARN).with_ansi(false).without_time().init();
    super::runtime().block_on(relay(behaviour, number(RELAYS), lease));
    true
}

/// Relays until standard input ends, then stops and prints each report.
async fn relay(behaviour: Behaviour, number: u64, lease: Duration) {
    let db = database::connect(&env::var(DATABASE).expect("the database is set")).await;
    let client = super::nats::connect(&env::var(NATS).expect("the server is set")).await;
    let relays: Vec<_> = (0..number)
        .map(|_| {
            let publisher = Scripted { behaviour, inner: NatsPublisher::jetstream(client.clone()) };
            Relay::builder(db.clone(), publisher)
                .lease(lease)
                .publish_timeout(lease * 2 / 3)
                .renew_every(lease / 5)
                .sweep_every(Duration::from_millis(200))
                .poll_every(Duration::from_millis(50))
                .retry(RetryPolicy::default().with_initial_delay(Duration::from_millis(50)))
                .build()
                .expect("the settings are safe")
                .spawn()
        })
        .collect();
    println!("started");
    let _ = tokio::io::stdin().read_to_end(&mut Vec::new()).await;
    for relay in relays {
        println!("{}", relay.shutdown().await.expect("the relay did not end on its own"));
    }
}

struct Scripted {
    behaviour: Behaviour,
    inner: NatsPublisher,
}

impl Publisher for Scripted {
    async fn publish(&self, message: &Message) -> Result<Ack, PublishError> {
        match self.behaviour {
            Behaviour::HoldBeforePublish => {
                println!("holding");
                return std::future::pending().await;
            }
            Behaviour::Hesitate => {
                println!("holding");
                sleep(Duration::from_millis(300)).await;
            }
            Behaviour::DieOfKiller if &message.payload()[..] == b"killer" => std::process::abort(),
            _ => {}
        }
        let ack = self.inner.publish(message).await?;
        if self.behaviour == Behaviour::HoldAfterAck {
            println!("acknowledged");
            return std::future::pending().await;
        }
        Ok(ack)
    }

    fn is_connected(&self) -> bool {
        self.inner.is_connected()
    }
}

/// A process with relays in it. It ends with the value, also when the test panics.
pub(crate) struct RelayProcess {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl RelayProcess {
    pub(crate) async fn start(
        database: &TestDatabase,
        stream: &TestStream,
        behaviour: Behaviour,
        relays: usize,
        lease: Duration,
    ) -> Self {
        let mut command = Command::new(env::current_exe().expect("this program has a path"));
        command
            .env(ROLE, format!("{behaviour:?}"))
            .env(DATABASE, &database.url)
            .env(NATS, &stream.url)
            .env(RELAYS, relays.to_string())
            .env(LEASE_MS, lease.as_millis().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child =
            tokio::process::Command::from(command).kill_on_drop(true).spawn().expect("the process starts");
        let lines = BufReader::new(child.stdout.take().expect("it is piped")).lines();
        let mut process = Self { child, lines };
        process.says("started").await;
        process
    }

    /// Waits for a line that contains `text`.
    pub(crate) async fn says(&mut self, text: &str) -> String {
        within(Duration::from_secs(30), text, async {
            loop {
                let line = self.lines.next_line().await.expect("its output can be read");
                let line = line.unwrap_or_else(|| panic!("it ended and never said {text:?}"));
                if line.contains(text) {
                    return line;
                }
            }
        })
        .await
    }

    /// SIGKILL: nothing of it runs after this.
    pub(crate) async fn kill(mut self) {
        self.child.kill().await.expect("it can be killed");
    }

    /// SIGSTOP.
    pub(crate) fn freeze(&self) {
        self.signal("STOP");
    }

    /// SIGCONT.
    pub(crate) fn thaw(&self) {
        self.signal("CONT");
    }

    /// Lets it stop by itself and returns the reports of its relays.
    pub(crate) async fn stop(self) -> Vec<String> {
        self.stop_and_tell().await.0
    }

    /// The same, with the warnings and errors in its log since [`says`](Self::says) was last asked.
    pub(crate) async fn stop_and_tell(mut self) -> (Vec<String>, Vec<String>) {
        drop(self.child.stdin.take());
        within(Duration::from_secs(30), "the process to stop", async {
            let (mut reports, mut complaints) = (Vec::new(), Vec::new());
            while let Some(line) = self.lines.next_line().await.expect("its output can be read") {
                let list = if line.starts_with("claimed") { &mut reports } else { &mut complaints };
                list.push(line);
            }
            assert!(self.child.wait().await.expect("it can be waited for").success());
            complaints.retain(|line| {
                line.trim_start().starts_with("WARN") || line.trim_start().starts_with("ERROR")
            });
            (reports, complaints)
        })
        .await
    }

    /// Whether it has ended, and how.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("it can be looked at")
    }

    fn signal(&self, name: &str) {
        let pid = self.child.id().expect("it runs").to_string();
        let status = Command::new("kill").args([&format!("-{name}"), &pid]).status();
        assert!(status.expect("`kill` runs").success());
    }
}
