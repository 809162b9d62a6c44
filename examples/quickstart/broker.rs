//! The broker that is at hand: NATS if there is any way to get one, otherwise a subscriber in this process.

use std::{
    collections::HashSet,
    env,
    net::TcpListener,
    path::PathBuf,
    process::Stdio,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use async_nats::{
    Client,
    jetstream::{self, consumer, stream},
};
use futures_util::StreamExt;
use sea_orm_outbox::{Ack, Message, NatsPublisher, PublishError, Publisher};
use testcontainers_modules::{
    nats::{Nats, NatsServerCmd},
    testcontainers::{ContainerAsync, ImageExt, runners::AsyncRunner},
};
use tokio::{
    process::{Child, Command},
    time::{sleep, timeout},
};

use crate::Result;

/// Where the messages go.
pub(crate) struct Broker {
    target: Target,
    how: &'static str,
    name: String,
    /// What has to go when it is over.
    server: Mutex<Server>,
}

enum Target {
    Nats { publisher: NatsPublisher, context: Box<jetstream::Context> },
    InProcess(Mutex<HashSet<String>>),
}

enum Server {
    /// Somebody else's.
    None,
    Process(Box<Child>, PathBuf),
    Container(Box<ContainerAsync<Nats>>),
}

impl Broker {
    /// `NATS_URL`, else `nats-server` on the `PATH`, else a container, else this process.
    pub(crate) async fn find() -> Result<Arc<Self>> {
        if let Ok(url) = env::var("NATS_URL") {
            let client = async_nats::connect(&url).await.map_err(|error| format!("NATS_URL: {error}"))?;
            return Self::nats(client, "NATS JetStream at NATS_URL", Server::None).await;
        }
        if let Some((client, server)) = Self::process().await {
            return Self::nats(client, "NATS JetStream, the nats-server on the PATH", server).await;
        }
        if let Some((client, server)) = Self::container().await {
            return Self::nats(client, "NATS JetStream in a container", server).await;
        }
        Ok(Arc::new(Self {
            target: Target::InProcess(Mutex::default()),
            how: "a subscriber in this process: no NATS_URL, no nats-server on the PATH and no container",
            name: "quickstart".to_owned(),
            server: Mutex::new(Server::None),
        }))
    }

    pub(crate) fn describe(&self) -> &str {
        self.how
    }

    pub(crate) fn topic(&self) -> String {
        format!("{}.orders.created", self.name)
    }

    /// The ids of all messages that arrived.
    pub(crate) async fn delivered(&self) -> Result<HashSet<String>> {
        let context = match &self.target {
            Target::InProcess(ids) => {
                return Ok(ids.lock().unwrap_or_else(PoisonError::into_inner).clone());
            }
            Target::Nats { context, .. } => context,
        };
        let mut stream = context.get_stream(self.name.to_uppercase()).await?;
        let stored = stream.info().await?.state.messages;
        let config = consumer::pull::Config { ack_policy: consumer::AckPolicy::None, ..Default::default() };
        let mut messages = stream.create_consumer(config).await?.messages().await?;
        let mut ids = HashSet::new();
        for _ in 0..stored {
            let next = timeout(Duration::from_secs(10), messages.next()).await?;
            let message = next.ok_or("the stream ended early")??;
            let id = message.headers.as_ref().and_then(|headers| headers.get("Nats-Msg-Id"));
            ids.insert(id.ok_or("a message has no id")?.to_string());
        }
        println!("\n           the stream holds {stored} messages with {} different ids", ids.len());
        Ok(ids)
    }

    /// Leaves nothing behind.
    pub(crate) async fn close(&self) {
        if let Target::Nats { context, .. } = &self.target {
            let _ = context.delete_stream(self.name.to_uppercase()).await;
        }
        let server = {
            let mut server = self.server.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *server, Server::None)
        };
        match server {
            Server::None => {}
            Server::Process(mut child, storage) => {
                let _ = child.kill().await;
                let _ = std::fs::remove_dir_all(storage);
            }
            Server::Container(container) => {
                let _ = container.rm().await;
            }
        }
    }

    async fn nats(client: Client, how: &'static str, server: Server) -> Result<Arc<Self>> {
        let name = format!("quickstart_{}", std::process::id());
        let context = jetstream::new(client.clone());
        let config = stream::Config {
            name: name.to_uppercase(),
            subjects: vec![format!("{name}.>")],
            // Repeats are dropped for as long as they can come.
            duplicate_window: Duration::from_secs(300),
            ..Default::default()
        };
        context
            .create_stream(config)
            .await
            .map_err(|error| format!("no stream can be created: {error}; is JetStream on?"))?;
        let publisher = NatsPublisher::jetstream(client);
        let target = Target::Nats { publisher, context: Box::new(context) };
        Ok(Arc::new(Self { target, how, name, server: Mutex::new(server) }))
    }

    async fn process() -> Option<(Client, Server)> {
        let port = TcpListener::bind("127.0.0.1:0").ok()?.local_addr().ok()?.port();
        let storage = env::temp_dir().join(format!("outbox-quickstart-{}-nats", std::process::id()));
        let mut child = Command::new("nats-server")
            .args(["--jetstream", "--addr", "127.0.0.1", "--port", &port.to_string(), "--store_dir"])
            .arg(&storage)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .ok()?;
        for _ in 0..100 {
            if let Ok(client) = async_nats::connect(format!("127.0.0.1:{port}")).await {
                return Some((client, Server::Process(Box::new(child), storage)));
            }
            sleep(Duration::from_millis(50)).await;
        }
        let _ = child.kill().await;
        None
    }

    async fn container() -> Option<(Client, Server)> {
        let command = NatsServerCmd::default().with_jetstream();
        let image = Nats::default().with_cmd(&command).with_tag("2");
        println!("           looking for a container engine");
        let container = timeout(Duration::from_secs(60), image.start()).await.ok()?.ok()?;
        let port = container.get_host_port_ipv4(4222).await.ok()?;
        let client = async_nats::connect(format!("127.0.0.1:{port}")).await.ok()?;
        Some((client, Server::Container(Box::new(container))))
    }
}

impl Publisher for Broker {
    async fn publish(&self, message: &Message) -> std::result::Result<Ack, PublishError> {
        // A network that takes its time, so that messages are in flight when the relay is killed.
        sleep(Duration::from_millis(20)).await;
        match &self.target {
            Target::Nats { publisher, .. } => publisher.publish(message).await,
            Target::InProcess(ids) => {
                let id = message.id().to_string();
                let new = ids.lock().unwrap_or_else(PoisonError::into_inner).insert(id);
                Ok(if new { Ack::new() } else { Ack::duplicate() })
            }
        }
    }

    fn is_connected(&self) -> bool {
        match &self.target {
            Target::Nats { publisher, .. } => publisher.is_connected(),
            Target::InProcess(_) => true,
        }
    }
}
