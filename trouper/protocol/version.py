"""The version of Trouper. It is defined here, since Trouper also runs without being installed as a
package."""

VERSION = "0.1.0"
