//! Workers that claim and settle on one table, without a broker: how they get in each other's way.
//!
//! ```sh
//! cargo bench --bench contention --all-features [-- --quick] [-- --json] [-- --database postgres --workers 1,8]
//! ```
//!
//! The servers run in containers, with fsync on; `BENCH_POSTGRES_URL`, `BENCH_MYSQL_URL` and `BENCH_MARIADB_URL`
//! replace them. What is compared is measured in turn, round after round, and each figure is the median of the
//! rounds: on a shared machine only the ratios repeat.

#[path = "../examples/shared/interrupt.rs"]
mod interrupt;
mod shared;

use std::{
    fmt,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use clap::{Parser, ValueEnum};
use interrupt::Interrupt;
use sea_orm::{ConnectionTrait, DatabaseConnection, DbBackend, Statement};
use sea_orm_outbox::{
    NewMessage, Outbox,
    lifecycle::{Outcome, RetryPolicy},
    store::{
        BehindFailed, Claim, ClaimRequest, ClaimStrategy, Ordering, Position, Settlement, Store, StoreError,
    },
};
use serde::Serialize;
use shared::{
    PAYLOAD, Result, median, print_json, rate, rounded,
    servers::{Kind, Server, connect},
};
use tokio::{sync::Barrier, task::JoinSet};

/// How often the head of the queue is looked at, as a relay does.
const HEAD_EVERY: Duration = Duration::from_secs(1);

/// How long a worker waits that won nothing, as a relay does after a lost race.
const PAUSE_MS: Range<u64> = 1..10;

/// Ordering keys, where there are any.
const KEYS: u64 = 1_000;

/// What order per key is measured with.
const KEYED_WORKERS: usize = 8;

/// What the scenarios are measured with.
const SCENARIO_WORKERS: usize = 1;

#[derive(Parser)]
struct Arguments {
    /// Fewer messages and one round: within a minute for each database.
    #[arg(long)]
    quick: bool,
    /// One JSON object per line.
    #[arg(long)]
    json: bool,
    /// Only these databases.
    #[arg(long, value_delimiter = ',')]
    database: Vec<DatabaseName>,
    /// Only these strategies.
    #[arg(long, value_delimiter = ',')]
    strategy: Vec<Strategy>,
    /// Only these numbers of workers. Order per key is measured with 8, the scenarios with 1.
    #[arg(long, value_delimiter = ',')]
    workers: Vec<usize>,
    /// The most rows of a claim.
    #[arg(long, default_value_t = 100)]
    batch: u64,
    /// Rounds, instead of 5, or of 1 with --quick.
    #[arg(long)]
    rounds: Option<usize>,
    /// The backlog, instead of 30,000 messages, or 10,000 with --quick.
    #[arg(long)]
    backlog: Option<u64>,
    /// What `cargo bench` passes to every benchmark.
    #[arg(long, hide = true)]
    bench: bool,
}

impl Arguments {
    fn rounds(&self) -> usize {
        self.rounds.unwrap_or(if self.quick { 1 } else { 5 })
    }

    fn backlog(&self) -> u64 {
        self.backlog.unwrap_or(if self.quick { 10_000 } else { 30_000 })
    }

    fn wants(&self, strategy: Strategy, workers: usize) -> bool {
        (self.strategy.is_empty() || self.strategy.contains(&strategy))
            && (self.workers.is_empty() || self.workers.contains(&workers))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
#[value(rename_all = "lower")]
enum DatabaseName {
    Postgres,
    MySql,
    MariaDb,
    Sqlite,
}

impl DatabaseName {
    fn kind(self) -> Kind {
        match self {
            Self::Postgres => Kind::Postgres,
            Self::MySql => Kind::MySql,
            Self::MariaDb => Kind::MariaDb,
            Self::Sqlite => Kind::Sqlite,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
enum Strategy {
    #[value(name = "SkipLocked")]
    SkipLocked,
    #[value(name = "Optimistic")]
    Optimistic,
    #[value(name = "per_key")]
    #[serde(rename = "per_key")]
    PerKey,
}

/// A line of the result.
#[derive(Serialize)]
struct Figure {
    database: DatabaseName,
    strategy: Strategy,
    #[serde(skip_serializing_if = "Option::is_none")]
    scenario: Option<Scenario>,
    workers: usize,
    rows_per_s: f64,
    lost_race_ratio: f64,
    deadlocks: u64,
    /// The claims that won nothing, of all.
    empty_claim_ratio: f64,
    /// Order per key: to the same without order. A scenario: to fresh statistics and connections.
    #[serde(skip_serializing_if = "Option::is_none")]
    ratio: Option<f64>,
    batch: u64,
    backlog: u64,
    rounds: usize,
}

#[tokio::main]
async fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let mut interrupt = Interrupt::listen()?;
    for database in DatabaseName::value_variants() {
        if !arguments.database.is_empty() && !arguments.database.contains(database) {
            continue;
        }
        let mut server = Server::start(database.kind()).await?;
        let measured = tokio::select! {
            biased;
            () = interrupt.wait() => Err("interrupted".into()),
            measured = measure(&arguments, *database, &mut server) => measured,
        };
        let stopped = server.stop().await;
        let figures = measured?;
        if arguments.json {
            figures.iter().try_for_each(print_json)?;
        } else {
            print_table(&figures);
        }
        stopped?;
    }
    Ok(())
}

fn print_table(figures: &[Figure]) {
    println!("database  strategy    workers   rows/s  lost races  empty claims  deadlocks  ratio");
    for figure in figures {
        let Figure { workers, rows_per_s, deadlocks, .. } = figure;
        println!(
            "{database:9} {strategy:11} {workers:7} {rows_per_s:8.0} {lost:9.1} % {empty:11.1} % \
             {deadlocks:10} {ratio:>6}  {scenario}",
            database = format!("{:?}", figure.database),
            strategy = format!("{:?}", figure.strategy),
            lost = figure.lost_race_ratio * 100.0,
            empty = figure.empty_claim_ratio * 100.0,
            ratio = figure.ratio.map(|ratio| format!("{ratio:.2}")).unwrap_or_default(),
            scenario = figure.scenario.map(|scenario| scenario.to_string()).unwrap_or_default(),
        );
    }
}

async fn measure(arguments: &Arguments, name: DatabaseName, server: &mut Server) -> Result<Vec<Figure>> {
    let bench = Bench::create(arguments, name, server).await?;
    let mut figures = curve(&bench).await?;
    figures.extend(per_key(&bench).await?);
    if name == DatabaseName::Postgres && arguments.wants(Strategy::SkipLocked, SCENARIO_WORKERS) {
        figures.extend(scenarios(&bench, server).await?);
    }
    Ok(figures)
}

/// Each strategy with more and more workers.
async fn curve(bench: &Bench<'_>) -> Result<Vec<Figure>> {
    let all =
        [1, 2, 4, 8, 16].map(|workers| [Strategy::SkipLocked, Strategy::Optimistic].map(|s| (s, workers)));
    let wanted =
        all.into_iter().flatten().filter(|(strategy, workers)| bench.arguments.wants(*strategy, *workers));
    let mut wanted: Vec<_> = wanted.map(|(strategy, workers)| (strategy, workers, Vec::new())).collect();
    for round in 1..=bench.arguments.rounds() {
        for (strategy, workers, drains) in &mut wanted {
            bench.empty().await?;
            bench.fill().await?;
            bench.gather_statistics().await?;
            let drain = bench.drain(*strategy, *workers).await?;
            eprintln!("{:?}, round {round}: {strategy:?}, {workers} workers: {drain}", bench.name);
            drains.push(drain);
        }
    }
    Ok(wanted
        .into_iter()
        .map(|(strategy, workers, drains)| bench.figure(strategy, workers, &drains))
        .collect())
}

/// The same messages, with a thousand keys, in order and without.
async fn per_key(bench: &Bench<'_>) -> Result<Option<Figure>> {
    if !bench.arguments.wants(Strategy::PerKey, KEYED_WORKERS) {
        return Ok(None);
    }
    let (mut drains, mut ratios) = (Vec::new(), Vec::new());
    for round in 1..=bench.arguments.rounds() {
        let mut both = Vec::new();
        for strategy in [Strategy::SkipLocked, Strategy::PerKey] {
            bench.empty().await?;
            bench.fill_with(|n| Some(format!("key-{}", n % KEYS))).await?;
            bench.gather_statistics().await?;
            both.push(bench.drain(strategy, KEYED_WORKERS).await?);
        }
        let [Some(in_order), Some(without)] = [both.pop(), both.pop()] else { continue };
        eprintln!("{:?}, round {round}: with keys {without}, in order per key {in_order}", bench.name);
        ratios.push(in_order.rate() / without.rate());
        drains.push(in_order);
    }
    let figure = bench.figure(Strategy::PerKey, KEYED_WORKERS, &drains);
    Ok(Some(Figure { ratio: Some(rounded(median(ratios))), ..figure }))
}

/// What has made a relay slow that was fast in a fresh table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
enum Scenario {
    /// The statistics are those of a queue that was drained.
    DrainedStatistics,
    /// The statements were prepared while the table was empty.
    PreparedWhileEmpty,
    /// Far more messages are delayed than due.
    BehindAMillionDelayed,
    /// Far more messages are kept than due.
    TwoMillionSent,
}

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.to_possible_value();
        f.write_str(name.as_ref().map_or("", |name| name.get_name()))
    }
}

async fn scenarios(bench: &Bench<'_>, server: &mut Server) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for scenario in Scenario::value_variants() {
        let changed = Bench::create(bench.arguments, bench.name, server).await?;
        // Nothing may mend the statistics.
        for database in [bench, &changed] {
            database.execute("ALTER TABLE outbox_message SET (autovacuum_enabled = off)").await?;
        }
        changed.add_ballast(*scenario).await?;
        let (mut drains, mut ratios) = (Vec::new(), Vec::new());
        for round in 1..=bench.arguments.rounds() {
            bench.empty().await?;
            bench.fill().await?;
            bench.gather_statistics().await?;
            let fresh = bench.drain(Strategy::SkipLocked, SCENARIO_WORKERS).await?;
            let drain = changed.drain_in(*scenario).await?;
            eprintln!("{:?}, round {round}: {scenario} {drain}, fresh {fresh}", bench.name);
            ratios.push(drain.rate() / fresh.rate());
            drains.push(drain);
        }
        figures.push(Figure {
            scenario: Some(*scenario),
            ratio: Some(rounded(median(ratios))),
            ..bench.figure(Strategy::SkipLocked, SCENARIO_WORKERS, &drains)
        });
        // It may be large.
        changed.execute("TRUNCATE outbox_message").await?;
    }
    Ok(figures)
}

/// A database to drain.
struct Bench<'a> {
    arguments: &'a Arguments,
    name: DatabaseName,
    url: String,
    db: DatabaseConnection,
}

impl<'a> Bench<'a> {
    async fn create(arguments: &'a Arguments, name: DatabaseName, server: &mut Server) -> Result<Self> {
        let url = server.database().await?;
        let db = connect(&url, 1).await?;
        Ok(Self { arguments, name, url, db })
    }

    async fn execute(&self, sql: &str) -> Result<()> {
        self.db.execute_unprepared(sql).await?;
        Ok(())
    }

    async fn empty(&self) -> Result<()> {
        match self.name {
            DatabaseName::Sqlite => self.execute("DELETE FROM outbox_message").await,
            _ => self.execute("TRUNCATE TABLE outbox_message").await,
        }
    }

    async fn fill(&self) -> Result<()> {
        self.fill_with(|_| None).await
    }

    async fn fill_with(&self, key: impl Fn(u64) -> Option<String>) -> Result<()> {
        self.enqueue(self.arguments.backlog(), key).await
    }

    async fn enqueue(&self, messages: u64, key: impl Fn(u64) -> Option<String>) -> Result<()> {
        let new = (0..messages).map(|n| {
            let message = NewMessage::bytes("bench.orders", "text/plain", vec![b'x'; PAYLOAD]);
            match key(n) {
                Some(key) => message.ordering_key(key),
                None => message,
            }
        });
        Outbox::new().enqueue_many(&self.db, new).await?;
        Ok(())
    }

    /// What the server would do by itself some time, before the clock runs.
    async fn gather_statistics(&self) -> Result<()> {
        match self.name {
            DatabaseName::Postgres => {
                self.execute("VACUUM ANALYZE outbox_message").await?;
                self.execute("CHECKPOINT").await
            }
            DatabaseName::MySql | DatabaseName::MariaDb => self.execute("ANALYZE TABLE outbox_message").await,
            DatabaseName::Sqlite => self.execute("PRAGMA wal_checkpoint(TRUNCATE)").await,
        }
    }

    async fn connections(&self, number: usize) -> Result<Vec<DatabaseConnection>> {
        let mut connections = Vec::new();
        for _ in 0..number {
            connections.push(connect(&self.url, 1).await?);
        }
        Ok(connections)
    }

    /// Claims and settles until nothing is left of the backlog.
    async fn drain(&self, strategy: Strategy, workers: usize) -> Result<Drain> {
        let connections = self.connections(workers).await?;
        self.drain_with(&connections, strategy).await
    }

    async fn drain_with(&self, connections: &[DatabaseConnection], strategy: Strategy) -> Result<Drain> {
        let deadlocks = self.deadlocks().await?;
        let left = Arc::new(AtomicU64::new(self.arguments.backlog()));
        let barrier = Arc::new(Barrier::new(connections.len() + 1));
        let mut workers = JoinSet::new();
        for (number, db) in connections.iter().enumerate() {
            let worker = Worker::new(db.clone(), number, strategy, self.arguments.batch)?;
            let (left, barrier) = (left.clone(), barrier.clone());
            workers.spawn(async move {
                barrier.wait().await;
                worker.drain(&left).await
            });
        }
        barrier.wait().await;
        let began = Instant::now();
        let mut drain = Drain { settled: self.arguments.backlog(), ..Drain::default() };
        while let Some(worker) = workers.join_next().await {
            drain.tally.add(&worker??);
        }
        drain.elapsed = began.elapsed();
        for db in connections {
            db.clone().close().await?;
        }
        self.sessions_end().await?;
        drain.deadlocks = self.deadlocks().await? - deadlocks;
        Ok(drain)
    }

    /// How many the server has counted.
    async fn deadlocks(&self) -> Result<u64> {
        let (backend, sql) = match self.name {
            DatabaseName::Postgres => (
                DbBackend::Postgres,
                "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()",
            ),
            DatabaseName::MySql => (
                DbBackend::MySql,
                "SELECT CAST(`count` AS SIGNED) FROM information_schema.innodb_metrics WHERE name = 'lock_deadlocks'",
            ),
            DatabaseName::MariaDb => (
                DbBackend::MySql,
                "SELECT CAST(variable_value AS SIGNED) FROM information_schema.global_status \
                 WHERE variable_name = 'Innodb_deadlocks'",
            ),
            // It has one writer.
            DatabaseName::Sqlite => return Ok(0),
        };
        self.number(backend, sql).await
    }

    /// Waits until the workers' sessions have ended: only then PostgreSQL has certainly counted what they met with.
    async fn sessions_end(&self) -> Result<()> {
        if self.name == DatabaseName::Postgres {
            let others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
                          AND backend_type = 'client backend' AND pid <> pg_backend_pid()";
            while self.number(DbBackend::Postgres, others).await? > 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
        Ok(())
    }

    async fn number(&self, backend: DbBackend, sql: &str) -> Result<u64> {
        let row = self.db.query_one_raw(Statement::from_string(backend, sql)).await?;
        let number: i64 = row.ok_or("the server has no answer")?.try_get_by_index(0)?;
        Ok(u64::try_from(number)?)
    }

    fn figure(&self, strategy: Strategy, workers: usize, drains: &[Drain]) -> Figure {
        let mut all = Tally::default();
        drains.iter().for_each(|drain| all.add(&drain.tally));
        Figure {
            database: self.name,
            strategy,
            scenario: None,
            workers,
            rows_per_s: rounded(median(drains.iter().map(Drain::rate).collect())),
            lost_race_ratio: rounded(all.lost_race_ratio()),
            deadlocks: drains.iter().map(|drain| drain.deadlocks).sum(),
            empty_claim_ratio: rounded(all.empty as f64 / all.claims.max(1) as f64),
            ratio: None,
            batch: self.arguments.batch,
            backlog: self.arguments.backlog(),
            rounds: self.arguments.rounds(),
        }
    }

    /// What stands in the table beside the backlog, in every round.
    async fn add_ballast(&self, scenario: Scenario) -> Result<()> {
        let (rows, columns, values) = match scenario {
            Scenario::BehindAMillionDelayed => (1_000_000, "available_at", "now() + interval '1 day'"),
            Scenario::TwoMillionSent => {
                (2_000_000, "available_at, status, version, attempts, sent_at", "NULL, 'SENT', 2, 1, now()")
            }
            Scenario::DrainedStatistics | Scenario::PreparedWhileEmpty => return Ok(()),
        };
        let rows = if self.arguments.quick { rows / 10 } else { rows };
        self.execute(&format!(
            "INSERT INTO outbox_message (topic, content_type, payload, {columns}) \
             SELECT 'bench.orders', 'text/plain', convert_to(repeat('x', {PAYLOAD}), 'UTF8'), {values} \
             FROM generate_series(1, {rows})"
        ))
        .await
    }

    async fn drain_in(&self, scenario: Scenario) -> Result<Drain> {
        let strategy = Strategy::SkipLocked;
        match scenario {
            Scenario::DrainedStatistics => {
                self.empty().await?;
                self.fill().await?;
                self.drain(strategy, SCENARIO_WORKERS).await?;
                self.gather_statistics().await?;
                self.fill().await?;
                self.execute("CHECKPOINT").await?;
                self.drain(strategy, SCENARIO_WORKERS).await
            }
            Scenario::PreparedWhileEmpty => {
                self.empty().await?;
                self.gather_statistics().await?;
                let connections = self.connections(SCENARIO_WORKERS).await?;
                for (number, db) in connections.iter().enumerate() {
                    // PostgreSQL considers a plan for good from the sixth time on.
                    for _ in 0..10 {
                        self.enqueue(1, |_| None).await?;
                        let left = AtomicU64::new(1);
                        Worker::new(db.clone(), number, strategy, self.arguments.batch)?.drain(&left).await?;
                    }
                }
                self.fill().await?;
                self.execute("CHECKPOINT").await?;
                self.drain_with(&connections, strategy).await
            }
            Scenario::BehindAMillionDelayed | Scenario::TwoMillionSent => {
                self.fill().await?;
                self.gather_statistics().await?;
                self.drain(strategy, SCENARIO_WORKERS).await
            }
        }
    }
}

/// One of those that drain the backlog.
struct Worker {
    store: Store,
    number: usize,
    strategy: ClaimStrategy,
    batch: u64,
}

impl Worker {
    fn new(db: DatabaseConnection, number: usize, strategy: Strategy, batch: u64) -> Result<Self> {
        let store = Store::new(db)?.with_statement_timeout(Duration::from_secs(60));
        let (store, strategy) = match strategy {
            Strategy::SkipLocked => (store, ClaimStrategy::SkipLocked),
            Strategy::Optimistic => (store, ClaimStrategy::Optimistic),
            Strategy::PerKey => {
                let ordering = Ordering::PerKey { behind_failed: BehindFailed::Hold };
                (store.with_ordering(ordering)?, ClaimStrategy::SkipLocked)
            }
        };
        Ok(Self { store, number, strategy, batch })
    }

    /// Until all workers together have settled what was `left`.
    async fn drain(&self, left: &AtomicU64) -> Result<Tally> {
        let policy = RetryPolicy::default();
        let mut tally = Tally::default();
        let (mut at, mut looked_at_head): (Option<Position>, _) = (None, Instant::now());
        while left.load(Relaxed) > 0 {
            // Beside the walk, which goes on afterwards.
            let aside = at.is_some() && looked_at_head.elapsed() >= HEAD_EVERY;
            let after = at.as_ref().filter(|_| !aside);
            if after.is_none() {
                looked_at_head = Instant::now();
            }
            let claimed_by = format!("worker-{}:{}", self.number, tally.claims);
            let request = ClaimRequest {
                strategy: self.strategy,
                limit: self.batch,
                claimed_by: &claimed_by,
                lease: Duration::from_secs(300),
                after,
                inline_bytes: None,
            };
            let claimed = self.store.claim(&request).await?;
            tally.claims += 1;
            tally.lost += claimed.lost_races;
            if !aside || claimed.claims.len() as u64 >= self.batch {
                at = claimed.next;
            }
            if claimed.claims.is_empty() {
                tally.empty += 1;
                if at.is_none() {
                    tokio::time::sleep(Duration::from_millis(fastrand::u64(PAUSE_MS))).await;
                }
                continue;
            }
            let settle = |claim: Claim| claim.settle(Outcome::Acknowledged, &policy, 0.0);
            let settlements: Vec<Settlement> = claimed.claims.into_iter().map(settle).collect();
            let settled = self.settle(&settlements).await?;
            tally.won += settled;
            left.fetch_sub(settled, Relaxed);
        }
        Ok(tally)
    }

    /// As a relay does: again where somebody was in the way.
    async fn settle(&self, settlements: &[Settlement]) -> Result<u64> {
        loop {
            match self.store.settle(settlements).await {
                Ok(lost) if lost.is_empty() => return Ok(settlements.len() as u64),
                Ok(lost) => return Err(format!("{} claims were lost", lost.len()).into()),
                Err(StoreError::Contention(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// What one worker met with, or all.
#[derive(Default)]
struct Tally {
    claims: u64,
    /// Claims that won nothing.
    empty: u64,
    won: u64,
    lost: u64,
}

impl Tally {
    fn add(&mut self, other: &Self) {
        self.claims += other.claims;
        self.empty += other.empty;
        self.won += other.won;
        self.lost += other.lost;
    }

    /// Of the rows tried.
    fn lost_race_ratio(&self) -> f64 {
        self.lost as f64 / (self.lost + self.won).max(1) as f64
    }
}

/// A backlog and how it went.
#[derive(Default)]
struct Drain {
    settled: u64,
    elapsed: Duration,
    tally: Tally,
    deadlocks: u64,
}

impl Drain {
    fn rate(&self) -> f64 {
        rate(self.settled, self.elapsed)
    }
}

impl fmt::Display for Drain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lost = self.tally.lost_race_ratio() * 100.0;
        write!(f, "{:.0} rows/s, {lost:.1} % of the races lost", self.rate())?;
        match self.deadlocks {
            0 => Ok(()),
            deadlocks => write!(f, ", {deadlocks} deadlocks"),
        }
    }
}
