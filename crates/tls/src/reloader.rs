//! TLS configurations that are rebuilt after their files change.

use std::{fmt, sync::Arc, time::SystemTime};

use crate::{
    files::{Contents, FileError, Files, Material},
    validity::Validity,
};

type Build<C> = fn(&Material) -> Result<C, rustls::Error>;

/// Builds a configuration from files, and a new one after their contents change.
pub struct Reloader<C> {
    files: Files,
    build: Build<C>,
    /// The latest configuration, and others that the caller still had when it was built.
    known: Vec<(Contents, Arc<Loaded<C>>)>,
}

/// A configuration and its period of validity.
#[derive(Debug)]
pub struct Loaded<C> {
    /// The configuration for rustls.
    pub config: Arc<C>,
    /// The validity of this side's certificate.
    pub validity: Validity,
    /// The time at which the first authority expires.
    pub authorities_not_after: SystemTime,
}

impl<C> fmt::Debug for Reloader<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reloader").field("files", &self.files).finish_non_exhaustive()
    }
}

impl<C> Reloader<C> {
    /// Creates a reloader without reading the files. `build` may fail only if the cryptographic
    /// provider lacks an algorithm.
    pub fn new(files: Files, build: Build<C>) -> Self {
        Self { files, build, known: Vec::new() }
    }

    /// The files.
    pub fn files(&self) -> &Files {
        &self.files
    }

    /// Reads the files, which blocks. If their contents are known, and this side's certificate has
    /// not expired, returns the same configuration (`Arc::ptr_eq`) with its session cache and
    /// ticket keys; else checks the files and returns a new one. Errors: the first fault of the
    /// files. Retry after the files have changed.
    pub fn load(&mut self, now: SystemTime) -> Result<Arc<Loaded<C>>, FileError> {
        let contents = self.files.read()?;
        let is_same =
            |(known, loaded): &&(Contents, Arc<Loaded<C>>)| *known == contents && !loaded.validity.has_expired(now);
        if let Some((_, loaded)) = self.known.iter().find(is_same) {
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
        self.known.retain(|(_, known)| Arc::strong_count(known) > 1);
        self.known.push((contents, Arc::clone(&loaded)));
        Ok(loaded)
    }
}

#[cfg(test)]
mod tests;
