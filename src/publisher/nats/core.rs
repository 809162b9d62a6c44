//! Core NATS: passed on to whoever listens, confirmed by a round trip.

use std::time::Duration;

use async_nats::{Client, RequestErrorKind};
use tokio::time::timeout;

use super::{
    DEFAULT_ACK_TIMEOUT,
    connection::{Before, Connection},
    headers, subject,
};
use crate::{
    message::Message,
    publisher::{Ack, PublishError},
};

pub(super) struct Core {
    connection: Connection,
    ack_timeout: Duration,
}

impl Core {
    pub(super) fn new(client: Client) -> Self {
        Self { connection: Connection::new(client), ack_timeout: DEFAULT_ACK_TIMEOUT }
    }

    pub(super) fn set_ack_timeout(&mut self, limit: Duration) {
        self.ack_timeout = limit;
    }

    pub(super) fn connection(&self) -> &Connection {
        &self.connection
    }

    pub(super) async fn publish(&self, message: &Message) -> Result<Ack, PublishError> {
        let client = &self.connection.client;
        let before = self.connection.begin()?;
        let (size, limit) = (message.wire_size(), client.max_payload());
        if size > limit {
            return Err(PublishError::permanent(format!("payload too large ({size} > {limit})")));
        }
        let (subject, headers) = (subject(message)?, headers(message)?);
        let payload = message.payload().clone();
        let round_trip = async {
            client
                .publish_with_headers(subject, headers, payload)
                .await
                .map_err(|error| PublishError::unavailable(format!("NATS: {error}")).with_source(error))?;
            // The server reads a connection in order. A request that nobody serves is answered by the server
            // itself, after it has read everything before.
            match client.request(client.new_inbox(), Default::default()).await {
                Err(error) if error.kind() == RequestErrorKind::NoResponders => Ok(()),
                Ok(_) => Ok(()),
                Err(error) => Err(self.no_answer(&before).with_source(error)),
            }
        };
        let confirmed =
            timeout(self.ack_timeout, round_trip).await.unwrap_or_else(|_| Err(self.no_answer(&before)));
        match confirmed {
            // The answer may be that of another connection than the one the message went into.
            Ok(()) if !self.connection.held(&before) => Err(Connection::lost("the round trip")),
            Ok(()) => Ok(Ack::new()),
            Err(error) => Err(error),
        }
    }

    /// A server that does not even answer itself is away.
    fn no_answer(&self, before: &Before) -> PublishError {
        if self.connection.held(before) {
            PublishError::unavailable("NATS did not answer the round trip in time")
        } else {
            Connection::lost("the round trip")
        }
    }
}
