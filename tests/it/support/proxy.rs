//! A stretch of network that can be held up.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream, tcp},
    sync::watch,
    task::JoinSet,
};

/// Passes connections on to a server; while it is frozen, what the server says does not arrive.
pub(crate) struct Proxy {
    pub(crate) port: u16,
    frozen: Arc<watch::Sender<bool>>,
    /// How many times the client may still say `COMMIT` before the network freezes.
    commits: Arc<AtomicUsize>,
    /// How often those that listen have been cut.
    cuts: Arc<watch::Sender<usize>>,
    _tasks: JoinSet<()>,
}

impl Proxy {
    /// `server` is `host:port`.
    pub(crate) async fn to(server: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let port = listener.local_addr().expect("it has an address").port();
        let frozen = Arc::new(watch::Sender::new(false));
        let commits = Arc::new(AtomicUsize::new(usize::MAX));
        let cuts = Arc::new(watch::Sender::new(0));
        let (freezing, counting, cutting) = (frozen.clone(), commits.clone(), cuts.clone());
        let server = server.to_owned();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut pumps = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                let Ok(upstream) = TcpStream::connect(&server).await else { continue };
                let (from_client, to_client) = client.into_split();
                let (from_server, to_server) = upstream.into_split();
                let (freezing, counting) = (freezing.clone(), counting.clone());
                let (mut is_frozen, mut cut) = (freezing.subscribe(), cutting.subscribe());
                cut.mark_unchanged();
                let listens = Arc::new(AtomicBool::new(false));
                let listening = listens.clone();
                pumps.spawn(pump(from_client, to_server, async move |said: &[u8]| {
                    if said.windows(7).any(|said| said == b"LISTEN ") {
                        listening.store(true, Ordering::SeqCst);
                    }
                    let commit = said.windows(7).any(|said| said == b"COMMIT\0");
                    if commit && counting.fetch_sub(1, Ordering::SeqCst) == 1 {
                        freezing.send_replace(true);
                    }
                }));
                pumps.spawn(pump(from_server, to_client, async move |_: &[u8]| {
                    // It ends with the proxy.
                    let _ = is_frozen.wait_for(|frozen| !frozen).await;
                    if listens.load(Ordering::SeqCst) && cut.has_changed().unwrap_or(true) {
                        std::future::pending::<()>().await;
                    }
                }));
            }
        });
        Self { port, frozen, commits, cuts, _tasks: tasks }
    }

    /// Freezes when the client says `COMMIT` for the `nth` time from now: the server hears it, and its answer
    /// does not arrive.
    pub(crate) fn freeze_at_commit(&self, nth: usize) {
        self.commits.store(nth, Ordering::SeqCst);
    }

    pub(crate) fn is_frozen(&self) -> bool {
        *self.frozen.borrow()
    }

    pub(crate) fn freeze(&self) {
        self.frozen.send_replace(true);
    }

    /// Those that `LISTEN` now hear nothing more, and are not told.
    pub(crate) fn cut_listeners(&self) {
        self.cuts.send_modify(|cuts| *cuts += 1);
    }

    pub(crate) fn thaw(&self) {
        self.frozen.send_replace(false);
    }
}

/// Passes on what is said, each piece after `before` has seen it.
async fn pump(mut from: tcp::OwnedReadHalf, mut to: tcp::OwnedWriteHalf, mut before: impl AsyncFnMut(&[u8])) {
    let mut buffer = vec![0; 16 * 1024];
    while let Ok(read @ 1..) = from.read(&mut buffer).await {
        before(&buffer[..read]).await;
        if to.write_all(&buffer[..read]).await.is_err() {
            return;
        }
    }
}
