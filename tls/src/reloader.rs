//! Files that change while the program runs.

use std::{fmt, sync::Arc, time::SystemTime};

use crate::{
    files::{Contents, FileError, Files, Material},
    validity::Validity,
};

type Build<C> = fn(&Material) -> Result<C, rustls::Error>;

/// Makes a configuration from files, and another when they hold something else.
pub struct Reloader<C> {
    files: Files,
    build: Build<C>,
    last: Option<(Contents, Arc<Loaded<C>>)>,
}

/// A configuration, and how long it can be used.
#[derive(Debug)]
pub struct Loaded<C> {
    /// For rustls.
    pub config: Arc<C>,
    /// Of the own certificate.
    pub validity: Validity,
    /// When the first of the authorities expires.
    pub authorities_not_after: SystemTime,
}

impl<C> fmt::Debug for Reloader<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reloader").field("files", &self.files).finish_non_exhaustive()
    }
}

impl<C> Reloader<C> {
    /// Reads nothing yet. `build` may fail only where the cryptographic provider lacks something.
    #[must_use]
    pub fn new(files: Files, build: Build<C>) -> Self {
        Self { files, build, last: None }
    }

    /// The files.
    #[must_use]
    pub fn files(&self) -> &Files {
        &self.files
    }

    /// Reads the files. As long as they hold the same, and that is still valid, the answer is the very same as before (`Arc::ptr_eq`),
    /// with its session cache and ticket keys; otherwise it is a new one, which shares neither. Blocks for as long as reading takes.
    ///
    /// # Errors
    ///
    /// The first thing that is wrong with the files as they are now. Trying again helps once they have changed.
    pub fn load(&mut self, now: SystemTime) -> Result<Arc<Loaded<C>>, FileError> {
        let contents = self.files.read()?;
        if let Some((known, loaded)) = &self.last
            && *known == contents
            && !loaded.validity.has_expired(now)
        {
            return Ok(Arc::clone(loaded));
        }
        let material = self.files.check(&contents, now)?;
        let config = (self.build)(&material).map_err(|error| FileError {
            option: "--tls-cert",
            file: self.files.cert.clone(),
            problem: error.to_string(),
            remedy: "use keys and certificates of a kind that rustls supports".to_owned(),
        })?;
        let Material { validity, authorities_not_after, .. } = material;
        let loaded = Arc::new(Loaded { config: Arc::new(config), validity, authorities_not_after });
        self.last = Some((contents, Arc::clone(&loaded)));
        Ok(loaded)
    }
}

#[cfg(test)]
mod tests;
