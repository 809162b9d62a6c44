//! What is said in the log while something runs.

use std::{
    cell::RefCell,
    io,
    sync::{Arc, Mutex, Once, PoisonError},
};

use tokio::sync::oneshot;
use tracing_subscriber::fmt::MakeWriter;

thread_local! {
    static OF_THIS_THREAD: RefCell<Option<Log>> = const { RefCell::new(None) };
}

/// Lines of the log, with their level and where they come from.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    /// Runs something on a runtime of one thread, whose log is kept here and nowhere else.
    pub(crate) async fn keep<Fut: Future>(&self, body: impl FnOnce() -> Fut + Send + 'static) -> Fut::Output
    where
        Fut::Output: Send + 'static,
    {
        subscribe();
        let log = self.clone();
        // Dropped with this future: then the other ends as well.
        let (_alive, gone) = oneshot::channel::<()>();
        let run = move || {
            OF_THIS_THREAD.set(Some(log));
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

/// One for the whole process: of several, one that ends may take lines from another.
fn subscribe() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::DEBUG)
            .with_ansi(false)
            .with_writer(OfThisThread)
            .finish();
        tracing::subscriber::set_global_default(subscriber).expect("nobody else listens");
    });
}

/// Writes to the log of the thread, if it has one.
struct OfThisThread;

impl MakeWriter<'_> for OfThisThread {
    type Writer = Box<dyn io::Write>;

    fn make_writer(&self) -> Self::Writer {
        match OF_THIS_THREAD.with_borrow(Clone::clone) {
            Some(log) => Box::new(log),
            None => Box::new(io::sink()),
        }
    }
}
