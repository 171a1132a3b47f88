// The search of the site runs in a worker, and Chromium starts no worker for a page that was opened from the disk. There an
// iframe takes its place: it runs the same script, and messages are passed in both directions.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      this.inside = frame.contentWindow
      window.addEventListener("message", event => {
        if (event.source === this.inside) this.dispatchEvent(new MessageEvent("message", { data: event.data }))
      })
      const names = this.inside.document.createElement("script")
      names.textContent = `
        self.postMessage = data => parent.postMessage(data, "*")
        self.importScripts = async (...urls) => {
          for (const url of urls) await new Promise(loaded => {
            const script = document.createElement("script")
            script.src = url
            script.onload = loaded
            document.head.appendChild(script)
          })
        }`
      this.inside.document.head.appendChild(names)
      this.started = this.inside.importScripts(url)
    }
    postMessage(data) {
      this.started.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {
      this.inside.frameElement.remove()
    }
  }
}
