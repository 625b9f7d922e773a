//! Noticing that the configuration file was edited.

use std::{path::PathBuf, time::Duration};

use tracing::warn;

/// Time between two looks. A ConfigMap takes a minute to reach a node's disk anyway.
const PERIOD: Duration = Duration::from_secs(1);

/// Returns once the file holds something else than `text`. A file that cannot be read is waited
/// for: it is being replaced, or gone, and an agent that ended would not start again.
pub async fn edited(path: PathBuf, text: String) {
    let mut is_missing = false;
    loop {
        tokio::time::sleep(PERIOD).await;
        match tokio::fs::read_to_string(&path).await {
            Ok(found) if found != text => return,
            Ok(_) => is_missing = false,
            Err(error) => {
                if !std::mem::replace(&mut is_missing, true) {
                    warn!(path = %path.display(), %error, "the configuration file cannot be read; the agent goes on with what it holds");
                }
            }
        }
    }
}
