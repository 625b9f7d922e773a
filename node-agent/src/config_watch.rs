//! Detects edits of the configuration file.

use std::{path::PathBuf, time::Duration};

use tracing::warn;

/// The interval at which the file is read. A shorter interval would not help: a changed ConfigMap
/// takes up to a minute to reach a node's disk.
const PERIOD: Duration = Duration::from_secs(1);

/// Returns the path of the file once its content differs from the given text. Waits also while the
/// file is absent, because an agent that ends now could not start again without it.
pub(crate) async fn edited(file: Option<(PathBuf, String)>) -> String {
    let Some((path, text)) = file else { return std::future::pending().await };
    let mut is_missing = false;
    loop {
        tokio::time::sleep(PERIOD).await;
        match tokio::fs::read_to_string(&path).await {
            Ok(found) if found != text => return path.display().to_string(),
            Ok(_) => is_missing = false,
            Err(error) => {
                if !std::mem::replace(&mut is_missing, true) {
                    warn!(path = %path.display(), %error, "cannot read the configuration file; the agent continues with its present configuration");
                }
            }
        }
    }
}
