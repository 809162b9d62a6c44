//! What is said in the log while something runs.

use std::{
    io,
    sync::{Arc, Mutex, PoisonError},
};

use tokio::sync::oneshot;
use tracing_subscriber::fmt::MakeWriter;

/// Lines of the log, with their level and where they come from.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    /// Runs something on a runtime of one thread, whose log is kept here and nowhere else.
    pub(crate) async fn keep<Fut: Future>(&self, body: impl FnOnce() -> Fut + Send + 'static) -> Fut::Output
    where
        Fut::Output: Send + 'static,
    {
        let log = self.clone();
        // Dropped with this future: then the other ends as well.
        let (_alive, gone) = oneshot::channel::<()>();
        let run = move || {
            let subscriber = tracing_subscriber::fmt()
                .with_max_level(tracing::Level::DEBUG)
                .with_ansi(false)
                .with_writer(log)
                .finish();
            let _guard = tracing::subscriber::set_default(subscriber);
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime starts").block_on(async {
                tokio::select! {
                    output = body() => output,
                    _ = gone => panic!("given up"),
                }
            })
        };
        match tokio::task::spawn_blocking(run).await {
            Ok(output) => output,
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
    }

    /// How many lines have both: a level, and these words.
    pub(crate) fn count(&self, level: &str, words: &str) -> usize {
        self.text().lines().filter(|line| line.contains(level) && line.contains(words)).count()
    }

    pub(crate) fn text(&self) -> String {
        let text = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&text).into_owned()
    }
}

impl io::Write for Log {
    fn write(&mut self, said: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(said);
        Ok(said.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for Log {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}
