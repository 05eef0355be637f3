//! Changes below a directory, as they happen.

use super::call::{self, Call};
use crate::sandbox::exec::Control;
use crate::sandbox::{Error, Sandbox};
use crate::wire::file_reply::{Kind as Reply, change};
use crate::wire::file_request::{self, Kind as Request};

/// What happened to a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeKind {
    Created,
    Modified,
    Removed,
    MovedFrom,
    MovedTo,
    Attributes,
    /// More happened than could be kept: look again at everything.
    Lost,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    pub kind: ChangeKind,
    /// Relative to the watched directory; empty for itself.
    pub path: Vec<u8>,
    pub directory: bool,
}

/// A watch that is on. Dropping it ends it.
#[derive(Debug)]
pub struct Watch {
    call: Call,
    /// Standard input stays open: its end is the end of the watch.
    _control: Option<Control>,
}

impl Watch {
    pub(super) async fn open(sandbox: &Sandbox, path: &[u8], recursive: bool) -> Result<Self, Error> {
        let request = file_request::Watch {
            path: path.to_vec(),
            recursive,
        };
        let (mut call, frame) = Call::open(sandbox, Request::Watch(request), None).await?;
        let control = call.control();
        let (sender, first) = (control.clone(), call.reply());
        let sending = async {
            if let Some(control) = sender {
                // A guest that takes nothing has answered, or is lost: the answer tells.
                let _ = control.input(&frame).await;
            }
        };
        match call::beside(first, sending).await? {
            Reply::Change(change) if change == Default::default() => Ok(Self {
                call,
                _control: control,
            }),
            Reply::Info(_) | Reply::Data(_) | Reply::Match(_) | Reply::Done(_) | Reply::Error(_) | Reply::Change(_) => {
                Err(call.lost("its answer to a file call was out of place"))
            }
        }
    }

    /// The next change. Cancellation-safe.
    ///
    /// # Errors
    /// When the watched directory, or the sandbox, is gone.
    pub async fn next(&mut self) -> Result<Change, Error> {
        let reply = self.call.reply().await?;
        let change = match reply {
            Reply::Change(change) => change,
            Reply::Done(_) => {
                return Err(Error::File {
                    code: "not_found".to_owned(),
                    message: "the watched directory is gone".to_owned(),
                });
            }
            Reply::Info(_) | Reply::Data(_) | Reply::Match(_) | Reply::Error(_) => {
                return Err(self.call.lost("its answer to a file call was out of place"));
            }
        };
        let kind = match change.r#type() {
            change::Type::Created => ChangeKind::Created,
            change::Type::Modified => ChangeKind::Modified,
            change::Type::Removed => ChangeKind::Removed,
            change::Type::MovedFrom => ChangeKind::MovedFrom,
            change::Type::MovedTo => ChangeKind::MovedTo,
            change::Type::Attributes => ChangeKind::Attributes,
            // A word that we do not know is no less.
            change::Type::Lost | change::Type::Unspecified => ChangeKind::Lost,
        };
        Ok(Change {
            kind,
            path: change.path,
            directory: change.directory,
        })
    }
}
