//! A stretch of network that can be held up.

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream, tcp},
    sync::watch,
    task::JoinSet,
};

/// Passes connections on to a server; while it is frozen, what the server says does not arrive.
pub(crate) struct Proxy {
    pub(crate) port: u16,
    frozen: watch::Sender<bool>,
    _tasks: JoinSet<()>,
}

impl Proxy {
    /// `server` is `host:port`.
    pub(crate) async fn to(server: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let port = listener.local_addr().expect("it has an address").port();
        let (frozen, is_frozen) = watch::channel(false);
        let server = server.to_owned();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut pumps = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                let Ok(upstream) = TcpStream::connect(&server).await else { continue };
                let (from_client, to_client) = client.into_split();
                let (from_server, to_server) = upstream.into_split();
                pumps.spawn(pump(from_client, to_server, None));
                pumps.spawn(pump(from_server, to_client, Some(is_frozen.clone())));
            }
        });
        Self { port, frozen, _tasks: tasks }
    }

    pub(crate) fn freeze(&self) {
        self.frozen.send_replace(true);
    }

    pub(crate) fn thaw(&self) {
        self.frozen.send_replace(false);
    }
}

async fn pump(
    mut from: tcp::OwnedReadHalf,
    mut to: tcp::OwnedWriteHalf,
    mut frozen: Option<watch::Receiver<bool>>,
) {
    let mut buffer = vec![0; 16 * 1024];
    while let Ok(read @ 1..) = from.read(&mut buffer).await {
        if let Some(frozen) = &mut frozen
            && frozen.wait_for(|frozen| !frozen).await.is_err()
        {
            return;
        }
        if to.write_all(&buffer[..read]).await.is_err() {
            return;
        }
    }
}
